"""Server-sent events: how JSON objects are framed, and the response that sends them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import orjson
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from streamserve.errors import StreamserveError
from streamserve.frontend.api.endpoint import Divert
from streamserve.frontend.api.problems import Problem, problem_of
from streamserve.frontend.api.waiting import end

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
WRITE_TIMEOUT_S = 120.0
# What the HTTP protocol offers besides ASGI (streamserve.frontend.protocol): to drop the connection at once;
# to write more of a body that has begun, and to wait until that is read.
ABORT_EXTENSION = "streamserve.abort"
WRITE_EXTENSION = "streamserve.write"

# Characters that JSON allows in a string but that many clients take for the end of a line.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
# Batches longer than this are framed in a thread, in parts of about that length.
LARGE_BYTES = 256 * 1024
# How objects of a stream that names its events begin.
_TYPE = b'{"type":"'


class Framing:
    """JSON objects as server-sent events.

    Args:
        names_events: each event is named by its object's `type`, the first member; the objects themselves
            tell of the stream's end, and of its failure.
    """

    def __init__(self, *, names_events: bool) -> None:
        self._names_events = names_events
        self.end = b"" if names_events else DONE

    def events(self, batch: list[bytes]) -> bytes:
        """What came at once, as one piece to write. Hot: once a chunk."""
        if self._names_events:
            return b"".join([self._named(encoded) for encoded in batch])
        if len(batch) == 1 and batch[0].isascii():
            return b"data: %b\n\n" % batch[0]
        return b"".join([_event(encoded) for encoded in batch])

    def error(self, problem: Problem) -> bytes:
        """The last event of a stream that failed after it had started, if it has not said so itself.

        No `[DONE]` follows.
        """
        return b"" if self._names_events else _event(problem.encode())

    def refusal(self, problem: Problem) -> bytes:
        """The only event of a stream that came to nothing after its headers had gone out."""
        error = problem.full_error
        if not self._names_events:
            return _event(orjson.dumps({"error": error}))
        flat = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._named(orjson.dumps({"type": "error", **flat, "error": error, "sequence_number": 0}))

    @staticmethod
    def _named(encoded: bytes) -> bytes:
        assert encoded.startswith(_TYPE), f"an event without a type: {encoded[:100]!r}"
        name = encoded[len(_TYPE) : encoded.index(b'"', len(_TYPE))]
        return b"event: " + name + b"\n" + _event(encoded)


def _event(encoded: bytes) -> bytes:
    """One event on one line, whatever the reader takes for a line. Hot: once a chunk."""
    if not encoded.isascii():
        encoded = b"".join([_on_one_line(part) for part in _parts(encoded)])
    return b"data: " + encoded + b"\n\n"


def _on_one_line(encoded: bytes) -> bytes:
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded


def _parts(encoded: bytes) -> Iterator[bytes]:
    """The same in parts, none of which takes longer than others may be kept from the interpreter."""
    start = 0
    while len(encoded) - start > LARGE_BYTES:
        # What stands before a quotation mark is a whole character; without one there are no more strings.
        end = encoded.find(b'"', start + LARGE_BYTES)
        if end < 0:
            break
        yield encoded[start:end]
        start = end
    yield encoded[start:] if start else encoded


def told(error: Exception) -> Problem:
    """What the client is told of a stream's failure; a fault of our own is logged."""
    if not isinstance(error, StreamserveError):
        logger.error("a stream failed", exc_info=error)
    return problem_of(error)


async def framed(events: Callable[[], bytes], batch: Sequence[bytes]) -> bytes:
    """The batch as it is written: an echoed prompt with log probabilities has many megabytes.

    Args:
        events: makes that of it.
        batch: what `events` works on.
    """
    return events() if sum(map(len, batch)) <= LARGE_BYTES else await asyncio.to_thread(events)


_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def _no_outlet(_chunk: bytes) -> bool:
    raise AssertionError("the server takes nothing directly")


class EventResponse(EventSourceResponse):
    """Sends events; stops when the client is gone, or has not read for too long.

    What differs from the base class, and why:

    * chunks are bytes already, and are neither converted nor logged; one timer for the stream watches all
      sends instead of one for each;
    * a ping is sent only into silence;
    * a client that has stopped reading has its connection dropped: closing it in the ordinary way would
      wait for it to read what is buffered;
    * shutting down is not noticed here: the streams themselves are ended with an error event when the drain
      time is over (streamserve.frontend.process), and until then go on.

    Args:
        headers: besides those of any event stream.
        ping_interval_s: silence after which a comment is sent.
        write_timeout_s: how long one send may wait for the client to read.
    """

    def __init__(self, headers: Mapping[str, str], *, ping_interval_s: float, write_timeout_s: float) -> None:
        # What is sent comes from `_stream_events`.
        super().__init__(iter(()), headers={**headers, **_HEADERS}, ping=ping_interval_s, sep="\n")
        # HTTP/1.1 connections stay open anyway, and a draining server must be able to say "close".
        del self.headers["Connection"]
        self._write_chunk: Callable[[bytes], bool] = _no_outlet
        self._drain_chunks: Callable[[], Awaitable[None]] | None = None
        self._abort: Callable[[], None] | None = None
        self._write_timeout_s = write_timeout_s
        self._last_send_s = time.monotonic()
        self._is_sending = False
        self._is_stuck = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions = scope.get("extensions", {})
        outlet = extensions.get(WRITE_EXTENSION)
        if outlet is not None:
            self._write_chunk, self._drain_chunks = outlet["write"], outlet["drain"]
        abort = extensions.get(ABORT_EXTENSION)
        self._abort = None if abort is None else abort["call"]
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()
            if self._is_stuck and self._abort is not None:
                self._abort()
                # So that the server has seen the connection go before it looks at this unfinished response.
                await asyncio.sleep(0)

    async def _close(self) -> None:
        """Gives up what is sent, however that ended."""
        raise NotImplementedError

    async def _stream_events(self, send: Send) -> bytes | None:
        """Sends all but the end, which it returns; None if the connection is to be dropped."""
        raise NotImplementedError

    async def _stream_response(self, send: Send) -> None:
        headers = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(headers)
        last = await self._stream_events(send)
        if last is None and self._abort is not None:
            self._is_stuck = True
            return
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": last or b"", "more_body": False})

    async def _patiently(self, send: Send, first: asyncio.Task[Result]) -> Result:
        """What `first` gives. A client that has to wait for it is sent a comment: some proxies, and some
        clients, take no notice of headers alone."""
        if not first.done():
            await self._send(send, PING)
        return await first

    async def _drain(self) -> None:
        """Waits until the client has read most of what was written."""
        assert self._drain_chunks is not None, "the server takes nothing directly"
        self._is_sending = True
        await self._drain_chunks()
        self._is_sending = False

    async def _send(self, send: Send, chunk: bytes) -> None:
        """Hot: once a chunk."""
        self._last_send_s = time.monotonic()
        self._is_sending = True
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_sending = False

    async def _ping(self, send: Send) -> None:
        """Fills silence, and gives up on a client that does not read. Returning ends the response."""
        while self.active and not self._is_stuck:
            silence_s = time.monotonic() - self._last_send_s
            limit_s = self._write_timeout_s if self._is_sending else float(self.ping_interval)
            if silence_s < limit_s:
                await asyncio.sleep(min(limit_s - silence_s, self._write_timeout_s))
            elif self._is_sending:
                self._is_stuck = True
            else:
                await self._send_ping(send)

    async def _send_ping(self, send: Send) -> None:
        async with self._send_lock:
            if not self.active:
                return
            self._last_send_s = time.monotonic()
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await send({"type": "http.response.body", "body": PING, "more_body": True})
            except TimeoutError:
                self._is_stuck = True

    @staticmethod
    async def _listen_for_exit_signal() -> None:
        # Never returns; the task group cancels it with the rest.
        await asyncio.get_running_loop().create_future()


class EventStream(EventResponse):
    """Sends the chunks of an answer.

    Where the answer and the server allow it, chunks go to the server in the turn of the event loop in which
    their tokens come in, past task and middleware.

    Args:
        first: what gets the first of `batches`; ended in any case. While it runs, the client is told that its
            request is being worked on.
        batches: the answer, as JSON objects; closed in any case. If it fails, the error is the last event.
        framing: makes events of them.
        divert: the answer's, if it has one (streamserve.frontend.api.endpoint.Divertible).
        ping_interval_s: silence after which a comment is sent.
        write_timeout_s: how long one send may wait for the client to read.
    """

    def __init__(
        self,
        first: asyncio.Task[list[bytes]],
        batches: AsyncGenerator[list[bytes], None],
        framing: Framing,
        *,
        divert: Divert | None = None,
        ping_interval_s: float,
        write_timeout_s: float,
    ) -> None:
        super().__init__({}, ping_interval_s=ping_interval_s, write_timeout_s=write_timeout_s)
        self._first = first
        self._batches = batches
        self._framing = framing
        self._divert = divert

    async def _close(self) -> None:
        await end(self._first)
        await self._batches.aclose()

    async def _stream_events(self, send: Send) -> bytes:
        """One turn a batch, or each time the client is slow."""
        try:
            first = await self._patiently(send, self._first)
        except Exception as error:
            return self._framing.refusal(told(error))
        await self._send(send, await self._events(first))
        while True:
            batch: list[bytes] | None = None
            # Only the answer's own failure is an event; that of a send says that nobody is there to see one.
            try:
                if self._divert is None or self._drain_chunks is None:
                    batch = await anext(self._batches)
                elif await self._divert(self._write):
                    return self._framing.end
            except StopAsyncIteration:
                return self._framing.end
            except Exception as error:
                return self._framing.error(told(error))
            if batch is None:
                await self._drain()
            else:
                await self._send(send, await self._events(batch))

    async def _events(self, batch: list[bytes]) -> bytes:
        return await framed(partial(self._framing.events, batch), batch)

    def _write(self, batch: list[bytes]) -> bool:
        """Hands a batch to the server; False if the client should be waited for. Hot: once a batch."""
        self._last_send_s = time.monotonic()
        return self._write_chunk(self._framing.events(batch))
