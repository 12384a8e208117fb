"""The answer to a chat or a completion, in one piece or in chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from streamserve.frontend.api import parameters
from streamserve.frontend.api.choice import Choice
from streamserve.frontend.api.choice_stream import ChoiceStream
from streamserve.frontend.api.chunks import Chunks, Form, Usage, UsageInChunks, usage_chunk
from streamserve.frontend.api.endpoint import Call, Write
from streamserve.frontend.api.feed import Feed, Feeds
from streamserve.frontend.api.logprobs import TokenNames
from streamserve.frontend.api.prompts import Prompt
from streamserve.frontend.api.schema.common import GenerationRequest
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.telling import Piece, PromptTelling, Telling
from streamserve.frontend.registry import Record
from streamserve.frontend.text.trace import TokenTrace


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request and what the engine is to do for it.

    Attributes:
        request: as it came.
        prompts: in token ids, with what the engine is asked about each.
        continues: the text goes on from that of the prompt.
    """

    request: GenerationRequest
    prompts: Sequence[Prompt]
    continues: bool


class GenerationAnswer:
    """The answer to one checked request (streamserve.frontend.api.endpoint.Answer)."""

    def __init__(self, service: Service, form: Form, call: Call, plan: Plan) -> None:
        request = plan.request
        self.id = f"{form.id_prefix}-{request.request_id or call.request_id}"
        self.is_stream = bool(request.stream)
        self.asks_resume = request.asks_resume
        self._service = service
        self._form = form
        self._tenant = call.tenant
        self._request = request
        self._choices = _choices(service, form, plan)
        self._generations = [choice.generation for choice in self._choices]
        self.is_divertible = len(self._choices) == 1
        # Of the only choice, while `batches` runs.
        self._only: tuple[Feed, ChoiceStream] | None = None
        self._head = {
            "id": self.id,
            "object": form.chunk_kind if self.is_stream else form.kind,
            "created": int(time.time()),
            "model": service.model_name,
        }

    def cancel(self) -> None:
        """Ends all its choices at once; what has come so far stands."""
        for generation in self._generations:
            generation.cancel()

    async def whole(self) -> bytes:
        """The answer as one JSON document."""
        choices = self._choices
        with self._service.registry.track(self.id, self._tenant, self._generations) as record:
            pieces = await self._collect(record)
        encoded: list[bytes] = []
        for index, at in enumerate(self._best()):
            described = {**await self._describe(choices[at], pieces[at]), "index": index}
            # Not all choices at once: each may have many megabytes.
            encoded.append(await self._service.run(choices[at].num_bytes, partial(orjson.dumps, described)))
        members = {}
        if self._form.is_chat:
            # A chat has one prompt, and what is told of it is told once.
            members = {**choices[0].prompt.ids(), **await choices[0].prompt_logprobs()}
        around = orjson.dumps({**self._head, "choices": [], "usage": self.usage(), **members})
        return await self._service.run(sum(map(len, encoded)), lambda: _filled(around, encoded))

    async def batches(self) -> AsyncGenerator[list[bytes], None]:
        """The answer's chunks. Nothing comes before the engine's first output, and no chunk without text."""
        with self._service.registry.track(self.id, self._tenant, self._generations) as record:
            streams = self._streams(record)
            async with Feeds(self._service.client, self._choices) as feeds:
                if self.is_divertible:
                    self._only = feeds.feeds[0], streams[0]
                running = set(self._choices)
                while True:
                    batch: list[bytes] = []
                    for choice in await feeds.news():
                        stream = streams[choice.index]
                        opening = await stream.begin()
                        if opening and choice.telling.echoes:
                            # May be long: not those of all choices at once.
                            yield [*batch, *opening]
                            batch, opening = [], []
                        batch += opening + stream.show()
                        if choice.has_more:
                            await feeds.give_turn(choice)
                        elif stream.is_over:
                            running.discard(choice)
                    if not running:
                        break
                    if batch:
                        yield batch
        yield batch + self._last()

    async def divert(self, write: Write) -> bool:
        """Goes on from where `batches` has yielded, handing each batch to `write` at once."""
        assert self._only is not None, "only a stream of one choice that has begun can be diverted"
        feed, stream = self._only
        if stream.is_over:
            return True
        is_over = await feed.divert(stream, write)
        if is_over and (last := self._last()):
            write(last)
        return is_over

    def usage(self) -> Usage:
        """The token counts so far: each prompt once, and all that was generated."""
        num_prompt = num_cached = num_completion = 0
        for at, choice in enumerate(self._choices):
            if at % self._request.num_candidates == 0:
                num_prompt += len(choice.generation.prompt)
                num_cached += choice.generation.cached_tokens
            num_completion += choice.assembler.num_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    # In one piece

    async def _collect(self, record: Record) -> list[list[Piece]]:
        """What each choice has to show, piece by piece: log probabilities are made as tokens come in."""
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        for choice in self._choices:
            choice.meter = record.meter(choice.index)
        running = set(self._choices)
        async with Feeds(self._service.client, self._choices) as feeds:
            while running:
                for choice in await feeds.news():
                    pieces[choice.index] += choice.show()
                    if choice.has_more:
                        await feeds.give_turn(choice)
                    elif choice.has_ended:
                        running.discard(choice)
        return pieces

    async def _describe(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        """One choice, as it stands in the answer but for its index."""
        if choice.telling.echoes:
            pieces = [await choice.echo(), *pieces]
        described = {
            "index": choice.index,
            **self._form.whole("".join([piece.text for piece in pieces])),
            "logprobs": _joined(choice.no_logprobs(), [piece.logprobs for piece in pieces]),
            "finish_reason": choice.assembler.finish_reason,
            **choice.ending(),
        }
        if choice.telling.has_ids:
            described["token_ids"] = [token for piece in pieces for token in piece.token_ids or ()]
        if not self._form.is_chat:
            described |= {**choice.prompt.ids(), **await choice.prompt_logprobs()}
        return described

    def _best(self) -> list[int]:
        """The candidates that are answered: all, or for each prompt the likeliest."""
        num_candidates, num_choices = self._request.num_candidates, self._request.num_choices
        everybody = range(len(self._choices))
        if num_candidates == num_choices:
            return list(everybody)
        best: list[int] = []
        for start in everybody[::num_candidates]:
            candidates = everybody[start : start + num_candidates]
            best += sorted(candidates, key=lambda at: -self._choices[at].mean_logprob())[:num_choices]
        return best

    # In chunks

    def _streams(self, record: Record) -> list[ChoiceStream]:
        asked = self._request.include_usage
        usage = UsageInChunks(asked, self.usage if self._request.continuous_usage else None)
        return [
            ChoiceStream(choice, Chunks(self._head, self._form, choice.index, usage), record.meter(at))
            for at, choice in enumerate(self._choices)
        ]

    def _last(self) -> list[bytes]:
        return [usage_chunk(self._head, self.usage())] if self._request.include_usage else []


def _filled(around: bytes, choices: Sequence[bytes]) -> bytes:
    """An answer without choices, with them. Joining drops the interpreter lock, as encoding would not."""
    key = b'"choices":['
    before, _, after = around.partition(key)
    parts = [before, key]
    for choice in choices:
        parts += choice, b","
    return b"".join([*parts[:-1], after])


def _choices(service: Service, form: Form, plan: Plan) -> list[Choice]:
    request = plan.request
    names = TokenNames(service.detokenizers, as_ids=bool(request.return_tokens_as_token_ids))
    telling = Telling.of(request, names, is_chat=form.is_chat)
    rules = parameters.stop_rules(request)
    choices: list[Choice] = []
    for prompt in plan.prompts:
        told = PromptTelling(prompt, telling, service.run)
        for generation in prompt.generations:
            trace = TokenTrace() if telling.traces else None
            own_rules = replace(rules, min_tokens=generation.params.min_tokens)
            assembler = service.assembler(request, own_rules, continues=plan.continues, trace=trace)
            choices.append(Choice(len(choices), told, generation, assembler, trace))
    return choices


def _joined(nothing: dict[str, Any] | None, parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Log probabilities of one text, from those of its pieces: every member is a list."""
    if nothing is None:
        return None
    return {name: [entry for part in parts if part for entry in part[name]] for name in nothing}
