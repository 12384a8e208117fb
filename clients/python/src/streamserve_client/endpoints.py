"""The three endpoints: where they are, what a request to each looks like, and how its stream adds up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from streamserve_client.accumulators import (
    Accumulator,
    chat_accumulator,
    completion_accumulator,
    response_accumulator,
)
from streamserve_client.documents import ChatChunk, ChatCompletion, Completion, Response, ResponseEvent

Chunk = TypeVar("Chunk")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Chunk, Answer]):
    """One of the API's endpoints.

    Attributes:
        name: on a WebSocket.
        path: over HTTP.
        id_prefix: what stands before the request's id in that of the answer.
        prompt: the field that has what is asked.
        counts_on_demand: a stream has token counts only where they are asked for.
        accumulator: makes what puts a stream together.
    """

    name: str
    path: str
    id_prefix: str
    prompt: str
    counts_on_demand: bool
    accumulator: Callable[[], Accumulator[Chunk, Answer]]

    def call(self, prompt: Any, options: Mapping[str, Any], extra_body: Mapping[str, Any] | None) -> Call:
        """A request for an answer in one piece."""
        return Call(
            self.name, self.path, self.id_prefix, {self.prompt: prompt, **options, **(extra_body or {})}
        )

    def stream_call(
        self, prompt: Any, options: Mapping[str, Any], extra_body: Mapping[str, Any] | None
    ) -> Call:
        """A request for a stream, with token counts unless the caller has said something of that."""
        counts = {"stream_options": {"include_usage": True}} if self.counts_on_demand else {}
        call = self.call(prompt, {**counts, **options}, extra_body)
        call.body["stream"] = True
        return call


@dataclass(frozen=True, slots=True)
class Call:
    """One request, whatever the transport.

    Attributes:
        endpoint: its name on a WebSocket.
        path: over HTTP.
        id_prefix: what stands before the request's id in that of the answer.
        body: JSON.
    """

    endpoint: str
    path: str
    id_prefix: str
    body: dict[str, Any]


CHAT: Endpoint[ChatChunk, ChatCompletion] = Endpoint(
    "chat.completions", "/v1/chat/completions", "chatcmpl-", "messages", True, chat_accumulator
)
COMPLETIONS: Endpoint[Completion, Completion] = Endpoint(
    "completions", "/v1/completions", "cmpl-", "prompt", True, completion_accumulator
)
RESPONSES: Endpoint[ResponseEvent, Response] = Endpoint(
    "responses", "/v1/responses", "resp_", "input", False, response_accumulator
)
