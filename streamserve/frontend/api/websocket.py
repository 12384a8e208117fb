"""/v1/ws: many streams over one WebSocket.

    client                                               server
    {"type":"create","id":I,"endpoint":E,"body":{…}}     {"id":I,"type":"chunk","chunk":{…}} …, or
    {"type":"cancel","id":I}                             {"id":I,"type":"result","result":{…}}, then
    {"type":"resume","id":I,"stream":S,"after":N}        {"id":I,"type":"done"}, or in place of any of them
    {"type":"ping"}                                      {"id":I,"type":"error","error":{…}}
                                                         {"type":"pong"}

Chunks and results are the very objects that HTTP carries. After `done` or `error` the id is free again. A
message that belongs to no stream (it cannot be read, its id is taken) is answered by an error without an id.

A stream that outlives the connection (streamserve.frontend.api.resume) is announced by
{"id":I,"type":"accepted","stream":S}, and its messages have a number besides, "n":N. On any later connection
`resume` gives those after it. An error without a number is not a part of such a stream.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from streamserve.errors import InvalidRequest, RequestError, StreamserveError
from streamserve.frontend.api.endpoint import Answer, Call, Endpoint
from streamserve.frontend.api.problems import Problem, problem_of
from streamserve.frontend.api.resume import Resumption
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.websocket_connection import Gone, Socket, parse_message
from streamserve.frontend.resume.reading import Ending, Reading

logger = logging.getLogger(__name__)

# Does what a message asks for, and returns the last one of its stream.
Work = Callable[[], Awaitable[bytes]]

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
        work: what `cancel` ends, once the request is checked.
    """

    __slots__ = ("_head", "id", "is_cancelled", "is_over", "work")

    def __init__(self, stream_id: str | int) -> None:
        self.id = stream_id
        self.is_over = False
        self.is_cancelled = False
        self.work: Answer | Reading | None = None
        self._head = b'{"id":' + orjson.dumps(stream_id) + b',"type":'

    def prefix(self, kind: bytes) -> bytes:
        """What stands before the JSON of a chunk or a result; `}` stands behind it."""
        return self._head + b'"' + kind + b'","' + kind + b'":'

    def accepted(self, name: str) -> bytes:
        """The first message of a stream that outlives the connection, under that name."""
        return self._head + b'"accepted","stream":' + orjson.dumps(name) + b"}"

    def done(self) -> bytes:
        """The last message of a stream that ended well."""
        return self._head + b'"done"}'

    def error(self, problem: Problem) -> bytes:
        """The last message of any other."""
        return self._head + b'"error","error":' + _encode(problem) + b"}"

    def ending(self, ending: Ending) -> bytes:
        """The last message of a stream that outlives the connection."""
        last = self.done() if ending.problem is None else self.error(ending.problem)
        return numbered(last, ending.number)


def numbered(message: bytes, number: int) -> bytes:
    """A message of a stream that outlives the connection. Hot: once a chunk."""
    return b'%b,"n":%d}' % (message[:-1], number)


class StreamSocket:
    """The application of /v1/ws.

    Args:
        service: limits, and the live answers.
        endpoints: what `endpoint` may name.
        resumption: streams that outlive the connection.
        max_streams: most live streams of a connection.
    """

    def __init__(
        self,
        service: Service,
        endpoints: Mapping[str, Endpoint],
        resumption: Resumption,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        self._service = service
        self._endpoints = endpoints
        self._resumption = resumption
        self._max_streams = max_streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = Socket(scope, receive, send)
        connection = Connection(socket, self._service, self._endpoints, self._resumption, self._max_streams)
        await socket.serve(connection.handle, self._service.draining)


class Connection:
    """The streams of one connection."""

    def __init__(
        self,
        socket: Socket,
        service: Service,
        endpoints: Mapping[str, Endpoint],
        resumption: Resumption,
        max_streams: int,
    ) -> None:
        self._socket = socket
        self._service = service
        self._endpoints = endpoints
        self._resumption = resumption
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
            message = await parse_message(text, self._service)
            kind = message.get("type")
            if kind == "create":
                await self._begin(message, partial(self._create, num_bytes=len(text)))
            elif kind == "resume":
                await self._begin(message, self._resume)
            elif kind == "cancel":
                self._cancel(_id_of(message))
            elif kind == "ping":
                await self._socket.send(PONG)
            else:
                raise InvalidRequest("type must be create, resume, cancel or ping.", "type")
        except StreamserveError as error:
            await self._socket.send(b'{"type":"error","error":' + _encode(problem_of(error)) + b"}")

    async def _begin(self, message: dict[str, Any], prepare: Callable[..., Work]) -> None:
        """Begins a stream of this connection, with what `prepare` makes of the message and the stream."""
        stream_id = _id_of(message)
        live = self._streams.get(stream_id)
        if live is not None and not live.is_over:
            raise DuplicateId(f"A live stream of this connection has the id {stream_id!r}.", "id")
        stream = Stream(stream_id)
        try:
            work = prepare(message, stream)
            if self._num_running >= self._max_streams:
                raise TooManyStreams(f"A connection may have {self._max_streams} live streams.")
        except RequestError as error:
            await self._socket.send(stream.error(problem_of(error)))
            return
        self._streams[stream_id] = stream
        self._num_running += 1
        self._socket.start(self._run(stream, work))

    def _create(self, message: dict[str, Any], stream: Stream, num_bytes: int) -> Work:
        name, body = message.get("endpoint"), message.get("body")
        endpoint = self._endpoints.get(name) if isinstance(name, str) else None
        if endpoint is None:
            raise InvalidRequest(f"endpoint must be one of {', '.join(self._endpoints)}.", "endpoint")
        if not isinstance(body, dict):
            raise InvalidRequest("body must be a JSON object.", "body")
        call = Call(body, num_bytes, secrets.token_hex(16), self._socket.tenant)
        return partial(self._answer, stream, endpoint, call)

    def _resume(self, message: dict[str, Any], stream: Stream) -> Work:
        name, after = message.get("stream"), message.get("after", 0)
        if not isinstance(name, str):
            raise InvalidRequest("stream must be the id of a stream.", "stream")
        # Not isinstance: true is no number.
        if type(after) is not int or not 0 <= after <= MAX_ID_NUMBER:
            raise InvalidRequest("after must be the number of an event.", "after")
        return partial(self._come_back, stream, name, after)

    def _cancel(self, stream_id: str | int) -> None:
        """Does nothing for a stream that is over: its end and the client's message may have crossed."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.is_cancelled = True
            if stream.work is not None:
                stream.work.cancel()

    async def _run(self, stream: Stream, work: Work) -> None:
        try:
            last = await work()
        except Gone:
            last = b""
        except Exception as error:
            if not isinstance(error, StreamserveError):
                logger.exception("a stream failed")
            last = stream.error(problem_of(error))
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

    async def _answer(self, stream: Stream, endpoint: Endpoint, call: Call) -> bytes:
        """Does what `create` asks; returns the last message."""
        answer = stream.work = await endpoint.accept(call)
        if stream.is_cancelled:
            # Before there was anything to end early.
            return stream.done()
        send = self._socket.send
        if not answer.is_stream:
            await send(stream.prefix(b"result") + await answer.whole() + b"}")
            return stream.done()
        if answer.asks_resume:
            reading = self._resumption.begin(answer, call, names_events=endpoint.names_events)
            if reading is not None:
                return await self._forward(stream, reading, stream.accepted(reading.stream_id))
        prefix = stream.prefix(b"chunk")
        async with aclosing(answer.batches()) as batches:
            async for batch in batches:
                for chunk in batch:
                    await send(prefix + chunk + b"}")
        return stream.done()

    async def _come_back(self, stream: Stream, name: str, after: int) -> bytes:
        """Does what `resume` asks; returns the last message."""
        reading = stream.work = await self._resumption.resume(name, self._socket.reach, after)
        if stream.is_cancelled:
            reading.cancel()
        return await self._forward(stream, reading)

    async def _forward(self, stream: Stream, reading: Reading, first: bytes = b"") -> bytes:
        """Sends what is read; returns the last message. When the connection goes, the stream goes on."""
        prefix, send = stream.prefix(b"chunk"), self._socket.send
        try:
            if first:
                await send(first)
            while True:
                piece = await reading.read()
                for number, chunk in enumerate(piece.events, piece.first):
                    await send(numbered(prefix + chunk + b"}", number))
                if piece.ending is not None:
                    return stream.ending(piece.ending)
        finally:
            reading.close()


def _id_of(message: dict[str, Any]) -> str | int:
    given = message.get("id")
    # Not isinstance: true is no number.
    if type(given) is str and 0 < len(given) <= MAX_ID_CHARS:
        return given
    if type(given) is int and abs(given) <= MAX_ID_NUMBER:
        return given
    raise InvalidRequest(f"id must be a string of 1 to {MAX_ID_CHARS} characters, or a whole number.", "id")


def _encode(problem: Problem) -> bytes:
    return orjson.dumps(problem.full_error)
