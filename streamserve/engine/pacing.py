"""DocumentPacer: how much of a long document a step may read while others watch their text appear.

Reading a document of tens of thousands of tokens takes seconds to minutes, and each token of it makes the
step in which it is read longer for everybody. So documents get a share of the time, and no more, as long as
anybody else runs: each second of the others' steps earns them some credit, each second of their own spends
it. A chunk is as large as takes about as long as a step without it, so that the others' tokens keep coming
evenly, or as long as nobody notices, since large chunks are cheaper by the token.

What a token of a document costs is measured, since it depends on the model, the machine and how far the
document has been read.
"""

from __future__ import annotations

# Least tokens of a chunk: below that, a step costs about the same.
MIN_CHUNK = 16
# A pause in the text that a reader does not notice.
UNNOTICED_S = 0.05
# Weight of the newest measurement in a moving average.
_NEWEST = 0.2


class DocumentPacer:
    """Tells the allowance of each step from how long the ones before it took.

    Args:
        share: most of the time that documents may take while others run, above 0; 1 is no limit.
    """

    def __init__(self, share: float) -> None:
        self._is_unlimited = share >= 1
        self._earned = 0.0 if self._is_unlimited else share / (1 - share)
        self._credit_s = 0.0
        # A step in which everybody decodes; a token of a document on top of that.
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._chunk = MIN_CHUNK

    def allowance(self) -> int | None:
        """Most tokens of documents in the next step if others run in it; None for no limit."""
        if self._is_unlimited:
            return None
        if self._decode_s is None or self._token_s is None:
            return MIN_CHUNK
        if self._credit_s <= 0:
            return 0
        fitting = int(_longest(self._decode_s) / self._token_s) if self._token_s else 2 * self._chunk
        self._chunk = max(MIN_CHUNK, min(fitting, 2 * self._chunk))
        return self._chunk

    def record(self, seconds: float, num_tokens: int, *, others_decode: bool) -> None:
        """A step has run in which others ran, too. Hot: once a step.

        Args:
            seconds: that it took.
            num_tokens: of documents in it.
            others_decode: nobody else ran more than one token.
        """
        if self._is_unlimited:
            return
        if num_tokens == 0:
            document_s = 0.0
            if others_decode:
                self._decode_s = _average(self._decode_s, seconds)
        elif others_decode and self._decode_s is not None:
            document_s = max(0.0, seconds - self._decode_s)
            self._token_s = _average(self._token_s, document_s / num_tokens)
        else:
            document_s = min(seconds, num_tokens * (self._token_s or 0.0))
        credit_s = self._credit_s + self._earned * (seconds - document_s) - document_s
        # What was not spent does not add up: a document that comes later starts like any other.
        self._credit_s = min(credit_s, _longest(self._decode_s or seconds))


def _longest(decode_s: float) -> float:
    """Seconds that a chunk may take."""
    return max(decode_s, UNNOTICED_S)


def _average(average: float | None, newest: float) -> float:
    return newest if average is None else average + _NEWEST * (newest - average)
