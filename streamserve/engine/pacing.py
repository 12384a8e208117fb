"""StepPacer: how much of prompts a step may read while others watch their text appear.

Every prompt token makes the step in which it is read longer for everybody. Two limits keep text flowing, and
neither holds when nobody decodes:

- *The length of a step.* Prompts are read in pieces that keep a step within a limit, a pause that a reader
  hardly notices, or let it take three times as long as without them where it is long by itself: so prompts
  have two thirds of the time at least. This is the stall-free batching of Sarathi-Serve (Agrawal et al., OSDI
  2024) with a budget in time instead of tokens.
- *The share of documents.* Reading tens of thousands of tokens takes seconds to minutes, so documents get a
  share of the time, and no more: each second of the others' steps earns them some credit, each second of
  their own spends it. A chunk is as large as takes about as long as a step without it, or as nobody notices
  at all.

What decoding costs and what a token adds is measured, since it depends on the model, the machine, the
requests and how far a document has been read. Where prompts never end, a step without them is made now and
then to see what decoding costs.
"""

from __future__ import annotations

from streamserve.engine.scheduler.output import StepMix
from streamserve.engine.scheduler.sharing import Pace

# Least tokens of a piece: below that, a step costs about the same.
MIN_CHUNK = 16
# More than any step has. What seems to cost nothing would else be allowed more than a float can count.
_MAX_CHUNK = 1 << 40
# A pause in the text that a reader does not notice.
UNNOTICED_S = 0.05
# Most time that prompts may add to a step, in steps of decoding, where the limit leaves them less.
_STRETCH = 2
# A step in which everybody decodes is made after so many in which somebody did not.
_PROBE_AFTER = 32
# Weight of the newest measurement in a moving average.
_NEWEST = 0.2


class StepPacer:
    """Tells the pace of each step from how long the ones before it took.

    Args:
        document_share: most of the time that documents may take while others run, above 0; 1 is no limit.
        mixed_step_limit_s: longest that prompts may make a step in which others decode, in seconds; 0 is no
            limit.
    """

    def __init__(self, document_share: float = 1.0, mixed_step_limit_s: float = 0.0) -> None:
        self._documents = _DocumentPacer(document_share) if document_share < 1 else None
        self._prompts = _PromptPacer(mixed_step_limit_s) if mixed_step_limit_s > 0 else None
        # A step in which everybody decodes; how many steps ago it was measured.
        self._decode_s: float | None = None
        self._decode_age = 0

    def pace(self) -> Pace:
        """That of the next step."""
        if self._prompts is None:
            prompt_tokens = None
        else:
            prompt_tokens = 0 if self._decode_age >= _PROBE_AFTER else self._prompts.allowance
        return Pace(
            prompt_tokens=prompt_tokens,
            document_tokens=None if self._documents is None else self._documents.allowance,
        )

    def record(self, seconds: float, mix: StepMix) -> None:
        """A step has run. Hot: once a step.

        Args:
            seconds: that it took.
            mix: what it consisted of.
        """
        if mix.num_decodes == mix.num_tokens:
            is_old = self._decode_age >= _PROBE_AFTER
            self._decode_s = seconds if is_old else _average(self._decode_s, seconds)
            self._decode_age = 0
        elif mix.num_decodes:
            self._decode_age += 1
        if self._prompts is not None:
            self._prompts.record(seconds, mix, self._decode_s)
        if self._documents is not None:
            self._documents.record(seconds, mix, self._decode_s)


class _Chunk:
    """How many tokens take how long beside others.

    Attributes:
        size: tokens that fit into the time.
    """

    def __init__(self) -> None:
        self.size = MIN_CHUNK
        # What a token adds to a step; None before it is known.
        self.token_s: float | None = None

    def measure(self, seconds: float, num_tokens: int) -> None:
        """So many tokens have added this to a step."""
        self.token_s = _average(self.token_s, seconds / num_tokens)

    def fit(self, seconds: float) -> None:
        """The next chunk may take so long."""
        if self.token_s is not None:
            # Growing by degrees, one step that was measured too short brings no long one.
            most = min(2 * self.size, _MAX_CHUNK)
            size = most if seconds >= most * self.token_s else int(seconds / self.token_s)
            self.size = max(MIN_CHUNK, size)


class _PromptPacer:
    """How many prompt tokens fit into a step beside those who decode.

    While what decoding costs is not known, or has changed, the rest of it counts as the prompts'; steps take
    as long as they may all the same, since so much is taken off again.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._chunk = _Chunk()

    @property
    def allowance(self) -> int:
        """Most prompt tokens of the next step if others decode in it."""
        return self._chunk.size

    def record(self, seconds: float, mix: StepMix, decode_s: float | None) -> None:
        decode_s = decode_s or 0.0
        alone_s = decode_s if mix.num_decodes else 0.0
        # What a few tokens cost says nothing of many.
        if mix.num_prompt_tokens >= MIN_CHUNK and mix.num_document_tokens == 0:
            self._chunk.measure(max(0.0, seconds - alone_s), mix.num_prompt_tokens)
        self._chunk.fit(max(self._limit_s - decode_s, _STRETCH * decode_s))


class _DocumentPacer:
    """How many tokens of documents a step may have if others run in it."""

    def __init__(self, share: float) -> None:
        self._earned = share / (1 - share)
        self._credit_s = 0.0
        self._chunk = _Chunk()

    @property
    def allowance(self) -> int:
        """Most tokens of documents in the next step; 0 while their share is spent."""
        is_spent = self._chunk.token_s is not None and self._credit_s <= 0
        return 0 if is_spent else self._chunk.size

    def record(self, seconds: float, mix: StepMix, decode_s: float | None) -> None:
        num_tokens = mix.num_document_tokens
        if num_tokens == mix.num_tokens:
            return
        if num_tokens == 0:
            document_s = 0.0
        elif mix.num_prompt_tokens == 0 and decode_s is not None:
            document_s = max(0.0, seconds - decode_s)
            self._chunk.measure(document_s, num_tokens)
        else:
            document_s = min(seconds, num_tokens * (self._chunk.token_s or 0.0))
        longest_s = max(decode_s or seconds, UNNOTICED_S)
        credit_s = self._credit_s + self._earned * (seconds - document_s) - document_s
        # What was not spent does not add up: a document that comes later starts like any other.
        self._credit_s = min(credit_s, longest_s)
        if num_tokens:
            self._chunk.fit(longest_s)


def _average(average: float | None, newest: float) -> float:
    return newest if average is None else average + _NEWEST * (newest - average)
