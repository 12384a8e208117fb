"""One choice of an answer while it comes in: its text, and what is told of its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.frontend.api.logprobs import LogprobsForm
from streamserve.frontend.api.telling import NO_PIECE, TOKEN_BYTES, Piece, PromptTelling
from streamserve.frontend.client import Generation
from streamserve.frontend.mailbox import Delta
from streamserve.frontend.registry import Meter
from streamserve.frontend.text.assemble import TextAssembler
from streamserve.frontend.text.trace import TokenTrace, TracedToken
from streamserve.messages import Finish

# Log probabilities are made of so many tokens at once; that takes no longer than a few milliseconds.
MAX_TOLD = 64
_NOTHING = Delta([], int(Finish.LENGTH), None)


@dataclass(slots=True, eq=False)
class Likelihood:
    """How likely the model thinks its own answer is."""

    _parts: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def add(self, chosen: npt.NDArray[np.float32]) -> None:
        """The log probabilities of the next tokens."""
        self._parts.append(chosen)

    def mean(self, num_tokens: int) -> float:
        """For each token, of the first `num_tokens` of them."""
        known = np.concatenate([np.zeros(0, dtype=np.float32), *self._parts])[:num_tokens]
        return float(known.mean()) if len(known) else 0.0


class Choice:
    """One choice. What comes is taken in at once, and shown when somebody wants to see it.

    Args:
        index: its place in the answer.
        prompt: what is told of what it goes on from.
        generation: what the engine was asked.
        assembler: its text.
        trace: of `assembler`, if it must be known.

    Attributes:
        index, prompt, generation, assembler: see above.
        telling: what is told besides its text.
        is_plain: `assembler` alone does: nothing but the text of the answer is told.
        meter: told of its tokens and its end; to be set before anything comes.
    """

    def __init__(
        self,
        index: int,
        prompt: PromptTelling,
        generation: Generation,
        assembler: TextAssembler,
        trace: TokenTrace | None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.generation = generation
        self.assembler = assembler
        self.telling = telling = prompt.telling
        self.is_plain = trace is None and not telling.ranks and not telling.is_scoring
        self.meter: Meter | None = None
        self._trace = trace
        self._form: LogprobsForm | None = telling.logprobs_form(prompt.num_chars)
        self._likelihood = Likelihood() if telling.ranks else None
        # What may be shown and was not: texts where there is no trace, else tokens.
        self._texts: list[str] = []
        self._ready: deque[TracedToken] = deque()

    @property
    def has_ended(self) -> bool:
        """Nothing more is taken in."""
        return self.assembler.finish_reason is not None

    def absorb(self, delta: Delta) -> None:
        """Takes `delta` in. Hot: once for each delta that is not written at once."""
        assert self.meter is not None, "nobody counts"
        self.meter.observe(len(delta.tokens))
        if self.telling.is_scoring:
            delta = _NOTHING
        if self._likelihood is not None and delta.logprobs is not None:
            self._likelihood.add(delta.logprobs.chosen)
        self.hold(self.assembler.accept(delta.tokens, delta.finish, delta.logprobs))

    def hold(self, text: str) -> None:
        """Keeps `text`, which the assembler has just given, to be shown."""
        if self._trace is None:
            self._texts.append(text)
        if self.assembler.finish_reason is not None and self.meter is not None:
            self.meter.finish(self.assembler.finish_reason)

    @property
    def num_bytes(self) -> int:
        """About how much JSON an answer in one piece has of it."""
        telling, num_tokens = self.telling, self.assembler.num_tokens
        if telling.echoes or telling.num_prompt_top is not None:
            num_tokens += len(self.generation.prompt)
        return TOKEN_BYTES * num_tokens * (1 + max(telling.num_top or 0, telling.num_prompt_top or 0))

    @property
    def has_more(self) -> bool:
        """Whether there is more to show than there was room for the last time."""
        return bool(self._ready)

    def show(self) -> tuple[Piece, Piece]:
        """What may be shown and was not, and what belongs to the end of the choice and is no text.

        A token and what is told of it are held back together. Of very many tokens only some are shown; the
        others should have to wait until others have had their turn.
        """
        if self._trace is not None:
            return self._show_tokens(self._trace)
        texts, self._texts = self._texts, []
        return Piece("".join(texts)), NO_PIECE

    def _show_tokens(self, trace: TokenTrace) -> tuple[Piece, Piece]:
        ready = self._ready
        ready += trace.take()
        limit = len(ready) if self._form is None else MAX_TOLD
        tokens = [ready.popleft() for _ in range(min(limit, len(ready)))]
        text = "".join([traced.text for traced in tokens])
        if ready:
            return self._piece(text, tokens, ()), NO_PIECE
        num_shown = sum(traced.is_text for traced in tokens) if text else 0
        shown = self._piece(text, tokens[:num_shown], ())
        return shown, self._piece("", tokens[num_shown:], trace.cut) if self.has_ended else NO_PIECE

    def _piece(self, text: str, tokens: Sequence[TracedToken], cut: Sequence[int]) -> Piece:
        """A piece of the text with its tokens.

        Args:
            cut: ids of tokens that a stop string has cut off: they were generated all the same.
        """
        logprobs = self._form.render(tokens) if self._form is not None and tokens else None
        ids = [*[traced.token for traced in tokens], *cut] if self.telling.has_ids else None
        return Piece(text, logprobs, ids)

    async def echo(self) -> Piece:
        """The prompt, as the beginning of the text. To be called when the first delta is there."""
        return await self.prompt.echo(self.generation.prompt_logprobs)

    async def prompt_logprobs(self) -> dict[str, Any]:
        """The member with the prompt's log probabilities, if it is wanted."""
        return await self.prompt.logprobs(self.generation.prompt_logprobs)

    def mean_logprob(self) -> float:
        """How likely the model thinks its own answer is, for each token."""
        assert self._likelihood is not None, "nobody ranks"
        return self._likelihood.mean(self.assembler.num_tokens)

    def ending(self) -> dict[str, Any]:
        """What a finished choice says besides why it finished."""
        reason = self.assembler.stop_reason
        return {} if reason is None else {"stop_reason": reason}

    def no_logprobs(self) -> dict[str, Any] | None:
        """The log probabilities of no tokens, if any are wanted."""
        return None if self._form is None else self._form.render(())
