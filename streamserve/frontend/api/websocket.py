"""/v1/ws: many streams over one WebSocket.

    client                                               server
    {"type":"create","id":I,"endpoint":E,"body":{…}}     {"id":I,"type":"chunk","chunk":{…}} …, or
    {"type":"cancel","id":I}                             {"id":I,"type":"result","result":{…}}, then
    {"type":"ping"}                                      {"id":I,"type":"done"}, or in place of any of them
                                                         {"id":I,"type":"error","error":{…}}
                                                         {"type":"pong"}

Chunks and results are the very objects that HTTP carries. After `done` or `error` the id is free again. A
message that belongs to no stream (it cannot be read, its id is taken) is answered by an error without an id.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from streamserve.errors import InvalidRequest, RequestError, StreamserveError
from streamserve.frontend.api.endpoint import Answer, Call, Endpoint
from streamserve.frontend.api.problems import problem_of
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.websocket_connection import Gone, Socket, parse_message, retry_after_s

logger = logging.getLogger(__name__)

MAX_STREAMS = 256
MAX_ID_CHARS = 128
# What JavaScript can tell apart.
MAX_ID_NUMBER = 2**53 - 1

PONG = b'{"type":"pong"}'


class TooManyStreams(RequestError):
    """The connection has as many live streams as it may have."""

    status = 429
    code = "too_many_streams"


class DuplicateId(InvalidRequest):
    """A live stream of the connection has this id."""

    code = "duplicate_id"


class Stream:
    """One stream of a connection.

    Attributes:
        is_over: its last message is on its way; the id may be used again.
        is_cancelled: the client does not want the rest.
        answer: once the request is checked.
    """

    __slots__ = ("_head", "answer", "id", "is_cancelled", "is_over")

    def __init__(self, stream_id: str | int) -> None:
        self.id = stream_id
        self.is_over = False
        self.is_cancelled = False
        self.answer: Answer | None = None
        self._head = b'{"id":' + orjson.dumps(stream_id) + b',"type":'

    def prefix(self, kind: bytes) -> bytes:
        """What stands before the JSON of a chunk or a result; `}` stands behind it."""
        return self._head + b'"' + kind + b'","' + kind + b'":'

    def done(self) -> bytes:
        """The last message of a stream that ended well."""
        return self._head + b'"done"}'

    def error(self, error: Exception) -> bytes:
        """The last message of any other."""
        return self._head + b'"error","error":' + _encode_error(error) + b"}"


class StreamSocket:
    """The application of /v1/ws.

    Args:
        service: limits, and the live answers.
        endpoints: what `endpoint` may name.
        max_streams: most live streams of a connection.
    """

    def __init__(
        self, service: Service, endpoints: Mapping[str, Endpoint], max_streams: int = MAX_STREAMS
    ) -> None:
        self._service = service
        self._endpoints = endpoints
        self._max_streams = max_streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = Socket(scope, receive, send)
        connection = Connection(socket, self._service, self._endpoints, self._max_streams)
        await socket.serve(connection.handle, self._service.draining)


class Connection:
    """The streams of one connection."""

    def __init__(
        self, socket: Socket, service: Service, endpoints: Mapping[str, Endpoint], max_streams: int
    ) -> None:
        self._socket = socket
        self._service = service
        self._endpoints = endpoints
        self._max_streams = max_streams
        self._streams: dict[str | int, Stream] = {}
        # Those that are over count until their last message has gone out: a client that does not read it
        # cannot begin others for ever.
        self._num_running = 0

    async def handle(self, text: bytes) -> None:
        """Does what a message says.

        Raises:
            Gone: the connection is over.
        """
        try:
            message = parse_message(text, self._service)
            kind = message.get("type")
            if kind == "create":
                await self._create(message, len(text))
            elif kind == "cancel":
                self._cancel(_id_of(message))
            elif kind == "ping":
                await self._socket.send(PONG)
            else:
                raise InvalidRequest("type must be create, cancel or ping.", "type")
        except StreamserveError as error:
            await self._socket.send(b'{"type":"error","error":' + _encode_error(error) + b"}")

    async def _create(self, message: dict[str, Any], num_bytes: int) -> None:
        stream_id = _id_of(message)
        live = self._streams.get(stream_id)
        if live is not None and not live.is_over:
            raise DuplicateId(f"A live stream of this connection has the id {stream_id!r}.", "id")
        stream = Stream(stream_id)
        try:
            endpoint, body = self._request_of(message)
        except RequestError as error:
            await self._socket.send(stream.error(error))
            return
        call = Call(body, num_bytes, secrets.token_hex(16), self._socket.tenant)
        self._streams[stream_id] = stream
        self._num_running += 1
        self._socket.start(self._run(stream, endpoint, call))

    def _request_of(self, message: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
        name, body = message.get("endpoint"), message.get("body")
        endpoint = self._endpoints.get(name) if isinstance(name, str) else None
        if endpoint is None:
            raise InvalidRequest(f"endpoint must be one of {', '.join(self._endpoints)}.", "endpoint")
        if not isinstance(body, dict):
            raise InvalidRequest("body must be a JSON object.", "body")
        if self._num_running >= self._max_streams:
            raise TooManyStreams(f"A connection may have {self._max_streams} live streams.")
        return endpoint, body

    def _cancel(self, stream_id: str | int) -> None:
        """Does nothing for a stream that is over: its end and the client's message may have crossed."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.is_cancelled = True
            if stream.answer is not None:
                stream.answer.cancel()

    async def _run(self, stream: Stream, endpoint: Endpoint, call: Call) -> None:
        try:
            await self._answer(stream, endpoint, call)
            last = stream.done()
        except Gone:
            last = b""
        except Exception as error:
            if not isinstance(error, StreamserveError):
                logger.exception("a stream failed")
            last = stream.error(error)
        stream.is_over = True
        try:
            if last:
                await self._socket.send(last)
        except Gone:
            pass
        finally:
            self._num_running -= 1
            if self._streams.get(stream.id) is stream:
                del self._streams[stream.id]

    async def _answer(self, stream: Stream, endpoint: Endpoint, call: Call) -> None:
        answer = stream.answer = await endpoint.accept(call)
        if stream.is_cancelled:
            # Before there was anything to end early.
            return
        send = self._socket.send
        if not answer.is_stream:
            await send(stream.prefix(b"result") + await answer.whole() + b"}")
            return
        prefix = stream.prefix(b"chunk")
        async with aclosing(answer.batches()) as batches:
            async for batch in batches:
                for chunk in batch:
                    await send(prefix + chunk + b"}")


def _id_of(message: dict[str, Any]) -> str | int:
    given = message.get("id")
    # Not isinstance: true is no number.
    if type(given) is str and 0 < len(given) <= MAX_ID_CHARS:
        return given
    if type(given) is int and abs(given) <= MAX_ID_NUMBER:
        return given
    raise InvalidRequest(f"id must be a string of 1 to {MAX_ID_CHARS} characters, or a whole number.", "id")


def _encode_error(error: Exception) -> bytes:
    problem = problem_of(error)
    body: dict[str, Any] = {**problem.error, "status": problem.status}
    retry_s = retry_after_s(problem)
    if retry_s is not None:
        body["retry_after"] = retry_s
    return orjson.dumps(body)
