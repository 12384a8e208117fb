"""What an answer tells besides the text of its choices, and what of that is the same for all choices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from streamserve.frontend.api.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobsForm,
    TokenNames,
    prompt_entries,
)
from streamserve.frontend.api.prompts import Prompt
from streamserve.frontend.api.schema.common import GenerationRequest
from streamserve.frontend.text.trace import Place, TracedToken
from streamserve.messages import Logprobs

# About as much JSON as a token takes, and as each of the likeliest ones at its place.
TOKEN_BYTES = 64

# Does some work, in a thread if there is much of it (streamserve.frontend.api.service.Service.run).
Run = Callable[[int, Callable[[], Any]], Awaitable[Any]]


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


NO_PIECE = Piece("")


@dataclass(frozen=True, slots=True)
class Telling:
    """What a request wants to be told besides text.

    Attributes:
        names: how tokens are called.
        is_chat: which form log probabilities have.
        is_stream: the answer comes in chunks.
        num_top: likeliest tokens at each position; None tells no log probabilities.
        num_prompt_top: the same for the prompt, in a member of its own.
        has_ids: the ids of prompt and answer.
        ranks: how likely the whole answer is; not told, but the best are chosen by it.
        echoes: the text begins with the prompt's.
        is_scoring: there is nothing else in it.
    """

    names: TokenNames
    is_chat: bool
    is_stream: bool
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
            is_stream=bool(request.stream),
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

    def logprobs_form(self, offset: int = 0) -> LogprobsForm | None:
        """What makes a choice's log probabilities, if they are wanted.

        Args:
            offset: where in the text its tokens begin.
        """
        if self.num_top is None:
            return None
        return (
            ChatLogprobs(self.names) if self.is_chat else CompletionLogprobs(self.names, self.num_top, offset)
        )


class PromptTelling:
    """What is told of one prompt. Made once, and where that takes long, in a thread.

    Args:
        prompt: which.
        telling: what is wanted.
        run: does the work.

    Attributes:
        telling: see above.
        num_chars: length of its text, where the answer begins with that; else 0.
    """

    def __init__(self, prompt: Prompt, telling: Telling, run: Run) -> None:
        self.num_chars = sum(map(len, prompt.texts))
        self._prompt = prompt
        self.telling = telling
        self._run = run
        self._ids: orjson.Fragment | None = None
        self._echo: asyncio.Future[Piece] | None = None
        self._entries: asyncio.Future[list[Any]] | None = None

    def ids(self) -> dict[str, Any]:
        """The member with its ids, if it is wanted."""
        if not self.telling.has_ids:
            return {}
        if self._ids is None:
            self._ids = orjson.Fragment(orjson.dumps(self._prompt.ids, option=orjson.OPT_SERIALIZE_NUMPY))
        return {"prompt_token_ids": self._ids}

    async def echo(self, logprobs: Logprobs | None) -> Piece:
        """Its text, for the beginning of an answer, and what belongs to that.

        Args:
            logprobs: of its tokens but the first, if the engine was asked.
        """
        if self._echo is None:
            self._echo = self._start(self.telling.num_top, lambda: self._make_echo(logprobs))
        return await self._echo

    async def logprobs(self, logprobs: Logprobs | None) -> dict[str, Any]:
        """The member with its log probabilities, if it is wanted."""
        num_top = self.telling.num_prompt_top
        if num_top is None or logprobs is None:
            return {}
        if self._entries is None:
            ids, names = self._prompt.ids, self.telling.names
            self._entries = self._start(
                num_top, lambda: prompt_entries(ids.tolist(), logprobs, num_top, names)
            )
        return {"prompt_logprobs": await self._entries}

    def _start(self, num_top: int | None, work: Callable[[], Any]) -> asyncio.Future[Any]:
        num_bytes = 0 if num_top is None else TOKEN_BYTES * len(self._prompt.ids) * (1 + num_top)
        return asyncio.ensure_future(self._run(num_bytes, work))

    def _make_echo(self, logprobs: Logprobs | None) -> Piece:
        ids, texts = self._prompt.ids.tolist(), self._prompt.texts
        text, form = "".join(texts), self.telling.logprobs_form()
        if form is None or logprobs is None:
            return Piece(text)
        places = [None, *[Place(logprobs, at) for at in range(len(ids) - 1)]]
        tokens = [
            TracedToken(token, text, place=place)
            for token, text, place in zip(ids, texts, places, strict=True)
        ]
        told = form.render(tokens)
        if self.telling.is_stream:
            # Goes into chunks as it is, one for each choice.
            told = {name: orjson.Fragment(orjson.dumps(values)) for name, values in told.items()}
        return Piece(text, told)
