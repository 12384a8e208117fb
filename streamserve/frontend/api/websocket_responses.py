"""WebSocket /v1/responses: OpenAI's own way to ask for responses over one connection.

    client                                               server
    {"type":"response.create", … the body of a request}  the events of a streamed answer, one a message, or
                                                         {"type":"error","status":…,"error":{…}}

A response that fails midway ends as any streamed one does, with the events `error` and `response.failed`.
Requests of one connection are answered one after the other. What needs a memory of earlier responses
(previous_response_id, generate: false, response.steer) is refused by name, and so are lanes (stream_id):
/v1/ws has many streams on one connection.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from contextlib import aclosing
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from streamserve.errors import InvalidRequest, RequestError, StreamserveError
from streamserve.frontend.api.endpoint import Call, Endpoint
from streamserve.frontend.api.problems import problem_of
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.websocket_connection import Gone, Socket, parse_message

logger = logging.getLogger(__name__)

MAX_QUEUED = 16

# What only this transport has, and its harmless values. A stream needs no asking for here.
_ENVELOPE: dict[str, tuple[Any, ...]] = {
    "generate": (None, True),
    "stream_id": (None,),
    "stream": (None, True, False),
}


class TooManyQueued(RequestError):
    """The connection has as many requests waiting as it may have."""

    status = 429
    code = "too_many_requests"


class ResponsesSocket:
    """The application of WebSocket /v1/responses.

    Args:
        service: limits.
        endpoint: what answers.
    """

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = Socket(scope, receive, send)
        connection = Connection(socket, self._service, self._endpoint)
        await socket.serve(connection.handle, self._service.draining)


class Connection:
    """The requests of one connection."""

    def __init__(self, socket: Socket, service: Service, endpoint: Endpoint) -> None:
        self._socket = socket
        self._service = service
        self._endpoint = endpoint
        self._queue: deque[Call] = deque()
        self._is_busy = False

    async def handle(self, text: bytes) -> None:
        """Takes a message.

        Raises:
            Gone: the connection is over.
        """
        try:
            call = self._call_of(await parse_message(text, self._service), len(text))
        except StreamserveError as error:
            await self._socket.send(_encode_error(error))
            return
        self._queue.append(call)
        if not self._is_busy:
            self._is_busy = True
            self._socket.start(self._run())

    def _call_of(self, message: dict[str, Any], num_bytes: int) -> Call:
        if message.pop("type", None) != "response.create":
            raise InvalidRequest("type must be response.create.", "type")
        for name, harmless in _ENVELOPE.items():
            given = message.pop(name, None)
            if not any(given is value for value in harmless):
                raise InvalidRequest(f"{name} is not supported here; leave it out.", name)
        if len(self._queue) >= MAX_QUEUED:
            raise TooManyQueued(f"{MAX_QUEUED} requests of this connection are waiting already.")
        return Call({**message, "stream": True}, num_bytes, secrets.token_hex(16), self._socket.tenant)

    async def _run(self) -> None:
        try:
            while self._queue:
                await self._answer(self._queue.popleft())
        except Gone:
            pass
        finally:
            self._is_busy = False

    async def _answer(self, call: Call) -> None:
        send = self._socket.send
        has_begun = False
        try:
            answer = await self._endpoint.accept(call)
            async with aclosing(answer.batches()) as batches:
                async for batch in batches:
                    has_begun = True
                    for event in batch:
                        await send(event)
        except Gone:
            raise
        except Exception as error:
            if not isinstance(error, StreamserveError):
                logger.exception("a stream failed")
            # A response that has begun tells of its failure itself.
            if not has_begun:
                await send(_encode_error(error))


def _encode_error(error: Exception) -> bytes:
    problem = problem_of(error)
    body = problem.error
    retry_s = problem.retry_after_s
    if retry_s is not None:
        body["headers"] = {"retry-after": str(retry_s)}
    return orjson.dumps({"type": "error", "status": problem.status, "error": body})
