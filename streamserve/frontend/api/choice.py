"""One choice of an answer while it comes in: its text, and what is told of its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamserve.frontend.api.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobsForm,
    Row,
    TokenNames,
    prompt_entries,
    prompt_rows,
    rows_of,
)
from streamserve.frontend.api.prompts import Prompt
from streamserve.frontend.api.schema.common import GenerationRequest
from streamserve.frontend.client import Generation
from streamserve.frontend.mailbox import Delta
from streamserve.frontend.text.assemble import TextAssembler
from streamserve.frontend.text.trace import TokenTrace, TracedToken
from streamserve.messages import Finish

_NOTHING = Delta([], int(Finish.LENGTH), None)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a choice has got and may be shown now.

    Attributes:
        text: may be empty.
        logprobs: of its tokens, in the endpoint's form, if they were asked for.
        token_ids: likewise.
    """

    text: str
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None


_NO_PIECE = Piece("")


@dataclass(frozen=True, slots=True)
class Telling:
    """What a request wants to be told besides text.

    Attributes:
        names: how tokens are called.
        is_chat: which form log probabilities have.
        num_top: likeliest tokens at each position; None tells no log probabilities.
        num_prompt_top: the same for the prompt, in a member of its own.
        has_ids: the ids of prompt and answer.
        ranks: how likely the whole answer is; not told, but the best are chosen by it.
        echoes: the text begins with the prompt's.
        is_scoring: there is nothing else in it.
    """

    names: TokenNames
    is_chat: bool
    num_top: int | None
    num_prompt_top: int | None
    has_ids: bool
    ranks: bool
    echoes: bool
    is_scoring: bool

    @classmethod
    def of(cls, request: GenerationRequest, names: TokenNames, *, is_chat: bool) -> Telling:
        """What `request` wants."""
        return cls(
            names=names,
            is_chat=is_chat,
            num_top=request.num_top_logprobs,
            num_prompt_top=request.prompt_logprobs,
            has_ids=bool(request.return_token_ids),
            ranks=request.num_candidates > request.num_choices,
            echoes=request.echoes,
            is_scoring=request.is_scoring,
        )

    @property
    def traces(self) -> bool:
        """Whether each token's part of the text must be known."""
        return self.num_top is not None or self.has_ids

    def logprobs_form(self) -> LogprobsForm | None:
        """What makes a choice's log probabilities, if they are wanted."""
        if self.num_top is None:
            return None
        return ChatLogprobs(self.names) if self.is_chat else CompletionLogprobs(self.names, self.num_top)


@dataclass(slots=True, eq=False)
class Choice:
    """One choice.

    Attributes:
        index: its place in the answer.
        prompt: what it goes on from.
        generation: what the engine was asked.
        assembler: its text.
        telling: what else is told.
        trace: of `assembler`, if it must be known.
    """

    index: int
    prompt: Prompt
    generation: Generation
    assembler: TextAssembler
    telling: Telling
    trace: TokenTrace | None
    _form: LogprobsForm | None = field(init=False)
    _rows: deque[Row] = field(default_factory=deque, init=False)
    _ids: list[int] = field(default_factory=list, init=False)
    _chosen: list[Any] = field(default_factory=list, init=False)
    _num_told: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._form = self.telling.logprobs_form()

    @property
    def is_plain(self) -> bool:
        """Whether `assembler` alone does: nothing but the text of the answer is told."""
        return self.trace is None and not self.telling.ranks and not self.telling.is_scoring

    def accept(self, delta: Delta) -> tuple[Piece, Piece]:
        """Takes `delta` in; what may be shown, and what belongs to the end of the choice and is no text.

        A token and what is told of it are held back together.
        """
        if self.telling.is_scoring:
            delta = _NOTHING
        if self.telling.ranks and delta.logprobs is not None:
            self._chosen.append(delta.logprobs.chosen)
        text = self.assembler.accept(delta.tokens, delta.finish)
        if self.trace is None:
            return Piece(text), _NO_PIECE
        if delta.logprobs is not None:
            self._rows += rows_of(delta.logprobs)
        self._ids += delta.tokens
        return self._detail(self.trace)

    def _detail(self, trace: TokenTrace) -> tuple[Piece, Piece]:
        tokens = trace.take()
        text = "".join([traced.text for traced in tokens]) + trace.rest
        num_shown = sum(traced.is_text for traced in tokens) if text else 0
        shown = Piece(text, self._tell_logprobs(tokens[:num_shown]), self._tell_ids(num_shown))
        if self.assembler.finish_reason is None:
            return shown, _NO_PIECE
        # The ids of tokens that a stop string has cut off were generated all the same.
        num_left = self.assembler.num_tokens - self._num_told
        return shown, Piece("", self._tell_logprobs(tokens[num_shown:]), self._tell_ids(num_left))

    def echo(self) -> Piece:
        """The prompt, as the beginning of the text. To be called when the first delta is there."""
        texts, found = self.prompt.texts, self.generation.prompt_logprobs
        logprobs = None
        if self._form is not None and found is not None:
            ids = self.prompt.ids.tolist()
            tokens = [TracedToken(token, text) for token, text in zip(ids, texts, strict=True)]
            logprobs = self._form.render(tokens, prompt_rows(found))
        return Piece("".join(texts), logprobs)

    def mean_logprob(self) -> float:
        """How likely the model thinks its own answer is, for each token."""
        chosen = np.concatenate(self._chosen)[: self.assembler.num_tokens]
        return float(chosen.mean()) if len(chosen) else 0.0

    def ending(self) -> dict[str, Any]:
        """What a finished choice says besides why it finished."""
        reason = self.assembler.stop_reason
        return {} if reason is None else {"stop_reason": reason}

    def prompt_ids(self) -> dict[str, Any]:
        """The member with the prompt's ids, if it is wanted."""
        return {"prompt_token_ids": self.prompt.ids.tolist()} if self.telling.has_ids else {}

    def prompt_logprobs(self) -> dict[str, Any]:
        """The member with the prompt's log probabilities, if it is wanted."""
        num_top, found = self.telling.num_prompt_top, self.generation.prompt_logprobs
        if num_top is None or found is None:
            return {}
        names = self.telling.names
        return {"prompt_logprobs": prompt_entries(self.prompt.ids.tolist(), found, num_top, names)}

    def no_logprobs(self) -> dict[str, Any] | None:
        """The log probabilities of no tokens, if any are wanted."""
        return None if self._form is None else self._form.render((), ())

    def _tell_logprobs(self, tokens: Sequence[TracedToken]) -> dict[str, Any] | None:
        if self._form is None or not tokens:
            return None
        return self._form.render(tokens, [self._rows.popleft() for _ in tokens])

    def _tell_ids(self, count: int) -> list[int] | None:
        """The ids of the next tokens."""
        if not self.telling.has_ids:
            return None
        begin = self._num_told
        self._num_told += count
        return self._ids[begin : self._num_told]
