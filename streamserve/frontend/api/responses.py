"""POST /v1/responses, and what WebSockets ask of it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import orjson

from streamserve.errors import InvalidRequest, RequestError
from streamserve.frontend.api import parameters
from streamserve.frontend.api.choice import Choice
from streamserve.frontend.api.endpoint import Call
from streamserve.frontend.api.feed import Feeds
from streamserve.frontend.api.logprobs import TokenNames
from streamserve.frontend.api.problems import Problem, problem_of
from streamserve.frontend.api.prompts import Preparation, Wording
from streamserve.frontend.api.response_events import ResponseEvents
from streamserve.frontend.api.schema.common import validate
from streamserve.frontend.api.schema.responses import UNSUPPORTED, ResponsesRequest
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.telling import PromptTelling, Telling
from streamserve.frontend.text.trace import TokenTrace

WORDING = Wording("input", adds_bos=False, default_max_tokens=None)

# By why the text ended: the last event, the response's status, and its incomplete_details.
_ENDINGS: dict[str, tuple[str, str, dict[str, str] | None]] = {
    "stop": ("completed", "completed", None),
    "length": ("incomplete", "incomplete", {"reason": "max_output_tokens"}),
    # OpenAI has the status, but neither an event nor a reason for it.
    "abort": ("incomplete", "cancelled", None),
}


class ResponsesEndpoint:
    """The endpoint: body → checked request → prompt text → ids → generation → response."""

    names_events = True

    def __init__(self, service: Service) -> None:
        self._service = service

    async def accept(self, call: Call) -> ResponsesAnswer:
        """Checks and prepares a request."""
        request = validate(ResponsesRequest, call.body, UNSUPPORTED)
        max_logprobs = self._service.api.max_logprobs
        if (request.top_logprobs or 0) > max_logprobs:
            raise InvalidRequest(f"top_logprobs must be between 0 and {max_logprobs} here.", "top_logprobs")
        preparation = Preparation(self._service, request, WORDING)
        preparation.check_limits(1)
        try:
            conversation = await self._service.run(call.num_bytes, request.conversation)
            text = await preparation.render(conversation)
        except RequestError as error:
            if error.param != "messages":
                raise
            # What a chat has as messages is the input here.
            raise type(error)(error.message, WORDING.param) from None
        (prompt,) = await preparation.make([text], call.num_bytes + len(text), call.tenant)
        (generation,) = prompt.generations
        names = TokenNames(self._service.detokenizers, as_ids=bool(request.return_tokens_as_token_ids))
        telling = Telling.of(request, names, is_chat=True)
        trace = TokenTrace() if telling.traces else None
        rules = replace(parameters.stop_rules(request), min_tokens=generation.params.min_tokens)
        assembler = self._service.assembler(request, rules, continues=False, trace=trace)
        told = PromptTelling(prompt, telling, self._service.run)
        choice = Choice(0, told, generation, assembler, trace)
        return ResponsesAnswer(self._service, call, request, choice)


class ResponsesAnswer:
    """The answer to one checked request (streamserve.frontend.api.endpoint.Answer)."""

    def __init__(self, service: Service, call: Call, request: ResponsesRequest, choice: Choice) -> None:
        request_id = request.request_id or call.request_id
        self.id = f"resp_{request_id}"
        self.is_stream = bool(request.stream)
        self.asks_resume = request.asks_resume
        self._service = service
        self._tenant = call.tenant
        self._request = request
        self._choice = choice
        self._item_id = f"msg_{request_id}"
        self._head = {"id": self.id, "object": "response", "created_at": int(time.time())}
        self._events = ResponseEvents(self._item_id)
        self._has_begun = False
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def cancel(self) -> None:
        """Ends it at once; what has come so far stands."""
        self._choice.generation.cancel()

    async def whole(self) -> bytes:
        """The response as one JSON document."""
        with self._service.registry.track(self.id, self._tenant, [self._choice.generation]) as record:
            self._choice.meter = record.meter(0)
            async with Feeds(self._service.client, [self._choice]) as feeds:
                while not self._is_told:
                    await self._take(feeds)
        return orjson.dumps(self._ended()[1])

    async def batches(self) -> AsyncGenerator[list[bytes], None]:
        """The events. Nothing comes before the engine's first output. Hot: one turn for each delta.

        A failure after that is the last two events, and raised as well.
        """
        try:
            with self._service.registry.track(self.id, self._tenant, [self._choice.generation]) as record:
                self._choice.meter = record.meter(0)
                async with Feeds(self._service.client, [self._choice]) as feeds:
                    while True:
                        text, logprobs = await self._take(feeds)
                        batch = [] if self._has_begun else self._begin()
                        if text:
                            batch.append(self._events.delta(text, logprobs))
                        if self._is_told:
                            break
                        if batch:
                            yield batch
            kind, response = self._ended()
            yield [*batch, *self._events.end(response["output"][0]), self._events.last(kind, response)]
        except Exception as error:
            if self._has_begun:
                yield self._failed(problem_of(error))
            raise

    @property
    def _is_told(self) -> bool:
        return self._choice.has_ended and not self._choice.has_more

    async def _take(self, feeds: Feeds) -> tuple[str, list[Any]]:
        """What may be shown and was not, which is kept as well: text and, if asked for, log probabilities.

        Hot: once for each delta.
        """
        await feeds.news()
        # What belongs to the end is no text, and an output text has log probabilities of its text alone.
        piece, _ = self._choice.show()
        if self._choice.has_more:
            await feeds.give_turn(self._choice)
        logprobs = [] if piece.logprobs is None else piece.logprobs["content"]
        self._logprobs += logprobs
        if piece.text:
            self._texts.append(piece.text)
        return piece.text, logprobs

    def _begin(self) -> list[bytes]:
        self._has_begun = True
        item = self._item("in_progress", has_content=False)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._events.begin(self._response("in_progress", []), item, part)

    def _failed(self, problem: Problem) -> list[bytes]:
        """The error, and the response as far as it came; its own error knows only OpenAI's codes."""
        failure = {"code": "server_error", "message": problem.message}
        response = self._response("failed", [self._item("incomplete")], error=failure)
        return [self._events.error(problem), self._events.last("failed", response)]

    def _ended(self) -> tuple[str, dict[str, Any]]:
        """The last event's kind, and the finished response."""
        reason = self._choice.assembler.finish_reason
        assert reason is not None, "the engine ended a stream without a reason"
        kind, status, details = _ENDINGS[reason]
        response = self._response(
            status,
            [self._item("completed" if kind == "completed" else "incomplete")],
            incomplete_details=details,
            completed_at=int(time.time()),
            usage=self._usage(),
        )
        return kind, response

    def _item(self, status: str, *, has_content: bool = True) -> dict[str, Any]:
        part = {
            "type": "output_text",
            "text": "".join(self._texts),
            "annotations": [],
            "logprobs": self._logprobs,
        }
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [part] if has_content else [],
        }

    def _usage(self) -> dict[str, Any]:
        generation, num_output = self._choice.generation, self._choice.assembler.num_tokens
        num_input = len(generation.prompt)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }

    def _response(self, status: str, output: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
        """The response object.

        Args:
            members: those that are not at their defaults.
        """
        request, params = self._request, self._choice.generation.params
        response = {
            **self._head,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "model": self._service.model_name,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
        }
        return {**response, **members}
