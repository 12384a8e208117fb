"""The answer to a chat or a completion, in one piece or in chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from streamserve.frontend.api.choice import Choice, Piece, Telling
from streamserve.frontend.api.choice_stream import ChoiceStream, Diversion
from streamserve.frontend.api.chunks import Chunks, Form, Usage, UsageInChunks, usage_chunk
from streamserve.frontend.api.endpoint import Call, Write
from streamserve.frontend.api.logprobs import TokenNames
from streamserve.frontend.api.merge import Merge
from streamserve.frontend.api.prompts import Prompt
from streamserve.frontend.api.schema.common import GenerationRequest
from streamserve.frontend.api.service import Service
from streamserve.frontend.client import Generation
from streamserve.frontend.registry import Record
from streamserve.frontend.text.trace import TokenTrace


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request and what the engine is to do for it.

    Attributes:
        request: as it came.
        prompts: in token ids.
        generations: for each prompt, one for each candidate.
        continues: the text goes on from that of the prompt.
    """

    request: GenerationRequest
    prompts: Sequence[Prompt]
    generations: Sequence[Sequence[Generation]]
    continues: bool


class GenerationAnswer:
    """The answer to one checked request (streamserve.frontend.api.endpoint.Answer)."""

    def __init__(self, service: Service, form: Form, call: Call, plan: Plan) -> None:
        request = plan.request
        self.id = f"{form.id_prefix}-{request.request_id or call.request_id}"
        self.is_stream = bool(request.stream)
        self._service = service
        self._form = form
        self._tenant = call.tenant
        self._request = request
        self._choices = _choices(service, form, plan)
        self._generations = [choice.generation for choice in self._choices]
        self.is_divertible = len(self._choices) == 1
        # Of the only choice, while `batches` runs.
        self._stream: ChoiceStream | None = None
        self._head = {
            "id": self.id,
            "object": form.chunk_kind if self.is_stream else form.kind,
            "created": int(time.time()),
            "model": service.model_name,
        }

    async def whole(self) -> bytes:
        """The answer as one JSON document."""
        with self._service.registry.track(self.id, self._tenant, self._generations) as record:
            choices = self._choices
            if len(choices) == 1:
                answered = [await self._collect(0, record)]
            else:
                answered = await self._collect_all(record)
        shown = [answered[at] for at in self._best()]
        for index, choice in enumerate(shown):
            choice["index"] = index
        # A chat has one prompt, and what is told of it is told once.
        members = {**choices[0].prompt_ids(), **choices[0].prompt_logprobs()} if self._form.is_chat else {}
        return orjson.dumps({**self._head, "choices": shown, "usage": self.usage(), **members})

    def batches(self) -> AsyncGenerator[list[bytes], None]:
        """The answer's chunks. Nothing comes before the engine's first output, and no chunk without text."""
        return self._run_one() if len(self._choices) == 1 else self._run_all()

    async def divert(self, write: Write) -> bool:
        """Goes on from where `batches` has yielded, handing each batch to `write` at once."""
        assert self._stream is not None, "only a stream of one choice that has begun can be diverted"
        if self._stream.is_finished:
            return True
        diversion = Diversion(self._service.client, self._stream, self._last, write)
        return await diversion.run()

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

    async def _collect_all(self, record: Record) -> list[dict[str, Any]]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._collect(at, record)) for at in range(len(self._choices))]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _collect(self, at: int, record: Record) -> dict[str, Any]:
        """One choice, as it stands in the answer but for its index."""
        choice = self._choices[at]
        pieces: list[Piece] = []
        async with aclosing(self._service.client.generate(choice.generation)) as deltas:
            async for delta in deltas:
                record.observe(len(delta.tokens), at)
                if choice.telling.echoes and not pieces:
                    pieces.append(choice.echo())
                pieces += choice.accept(delta)
                if choice.assembler.finish_reason is not None:
                    break
        reason = choice.assembler.finish_reason
        assert reason is not None, "the engine ended a stream without a reason"
        record.finish(reason, at)
        return self._describe(choice, pieces)

    def _describe(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
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
            described |= {**choice.prompt_ids(), **choice.prompt_logprobs()}
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

    async def _run_one(self) -> AsyncGenerator[list[bytes], None]:
        """Hot: one turn for each delta."""
        with self._service.registry.track(self.id, self._tenant, self._generations) as record:
            (stream,) = self._streams(record)
            self._stream = stream
            async with aclosing(self._service.client.generate(stream.generation)) as deltas:
                async for delta in deltas:
                    batch = stream.accept(delta)
                    if stream.is_finished:
                        break
                    if batch:
                        yield batch
            assert stream.is_finished, "the engine ended a stream without a reason"
        yield batch + self._last()

    async def _run_all(self) -> AsyncGenerator[list[bytes], None]:
        with self._service.registry.track(self.id, self._tenant, self._generations) as record:
            streams = self._streams(record)
            num_running = len(streams)
            async with Merge(self._service.client, self._generations) as merge:
                while True:
                    batch: list[bytes] = []
                    for at, delta in await merge.take():
                        stream = streams[at]
                        batch += stream.accept(delta)
                        if stream.is_finished:
                            num_running -= 1
                            merge.stop(at)
                    if not num_running:
                        break
                    if batch:
                        yield batch
        yield batch + self._last()

    def _last(self) -> list[bytes]:
        return [usage_chunk(self._head, self.usage())] if self._request.include_usage else []


def _choices(service: Service, form: Form, plan: Plan) -> list[Choice]:
    request = plan.request
    names = TokenNames(service.detokenizers, as_ids=bool(request.return_tokens_as_token_ids))
    telling = Telling.of(request, names, is_chat=form.is_chat)
    choices: list[Choice] = []
    for prompt, generations in zip(plan.prompts, plan.generations, strict=True):
        for generation in generations:
            trace = TokenTrace() if telling.traces else None
            assembler = service.assembler(request, generation, continues=plan.continues, trace=trace)
            choices.append(Choice(len(choices), prompt, generation, assembler, telling, trace))
    return choices


def _joined(nothing: dict[str, Any] | None, parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Log probabilities of one text, from those of its pieces: every member is a list."""
    if nothing is None:
        return None
    return {name: [entry for part in parts if part for entry in part[name]] for name in nothing}
