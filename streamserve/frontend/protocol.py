"""uvicorn's HTTP protocol with limits on the request head, and a way to drop a connection.

The parser itself puts no bound on header lines or on the time they take, so one connection could hold any
amount of memory. Everything behind the head (body size and time, slow readers) is limited by the application,
except for a body that goes on after its answer: nobody reads that any more.

A client that is answered before it has sent everything gets to read the answer
(streamserve.frontend.farewell).

One request at a time: what a client sends while its answer is still being written is not read, and the
connection closes after that answer. uvicorn's own pipelining notices a lost connection only for the newest
request, so an older one would run on for nobody; and nothing else may be written into an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from streamserve.config import ServerConfig
from streamserve.frontend.api.problems import Problem
from streamserve.frontend.api.sse import ABORT_EXTENSION, WRITE_EXTENSION
from streamserve.frontend.farewell import Farewell
from streamserve.frontend.middleware import valid_request_id


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """What the head of a request may take."""

    max_bytes: int
    max_headers: int
    timeout_s: float

    @classmethod
    def of(cls, config: ServerConfig) -> HeadLimits:
        """As configured."""
        return cls(config.max_head_bytes, config.max_headers, config.head_timeout)


class Outlet:
    """What uvicorn's side of a request sees of the connection: the same, but it is closed in another way."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        limits: on the heads of its requests.
    """

    def __init__(self, *args: Any, limits: HeadLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        # Bytes of the head that is arriving; None between its end and the next one's beginning.
        self._head_bytes: int | None = 0
        self._head_timer: asyncio.TimerHandle | None = None
        # Runs while the rest of a body comes that was answered before its end, on a connection that is kept.
        self._rest_timer: asyncio.TimerHandle | None = None
        # Bytes since the last one of a body that is arriving: the size of a chunk, its extensions, trailers.
        self._bare_bytes = 0
        self._has_body_come = False
        # Whether a request ended in the bytes that came last, so that not all of them are of the next head.
        self._has_ended = False
        # Whether nothing more is read: the connection closes after the answer that is being written.
        self._is_deaf = False
        # Once there is nothing more to say to a client that is not done.
        self._farewell: Farewell | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection is open; its first request's head must come soon."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_head_timer()
        self._stop_rest_timer()
        if self._farewell is not None:
            self._farewell.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._farewell is not None:
            self._farewell.hear(len(data))
        if self._is_deaf:
            return
        self._has_ended = self._has_body_come = False
        super().data_received(data)
        if self._has_ended or self._is_deaf or self.transport.is_closing():
            return
        if self._head_bytes is None:
            self._bare_bytes = 0 if self._has_body_come else self._bare_bytes + len(data)
            if self._bare_bytes > self._limits.max_bytes:
                self._give_up()
            return
        # Whole lines are counted as they come; this is for one that never ends. Between two requests of a
        # kept connection nothing has come, and uvicorn's own timer runs.
        self._head_bytes += len(data)
        if self._head_bytes > self._limits.max_bytes:
            self._refuse(431, "The request's headers are too large.")

    def on_message_begin(self) -> None:
        """A request's first byte came."""
        if self._is_answering():
            self._go_deaf()
            raise httptools.HttpParserError("a request before the last one was answered")
        super().on_message_begin()
        self._head_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()
        extensions: dict[str, Any] = {
            ABORT_EXTENSION: {"call": self.transport.abort},
            WRITE_EXTENSION: {"write": self.write_chunk, "drain": self.flow.drain},
        }
        self.scope["extensions"] = extensions

    def write_chunk(self, data: bytes) -> bool:
        """Writes more of the body of an answer that has begun; False if the client should be waited for.

        The same bytes as a message to the application's `send`, without the way there. Hot: once a chunk.
        """
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self.flow.write_paused

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target came."""
        super().on_url(url)
        self._check(len(self.url) <= self._limits.max_bytes)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header came."""
        super().on_header(name, value)
        self._check(len(self.headers) <= self._limits.max_headers)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._check(sum(len(name) + len(value) for name, value in self.headers) <= self._limits.max_bytes)
        self._head_bytes = None
        self._bare_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        # It closes the connection as soon as an answer is whole that says so.
        outlet: Any = Outlet(self.transport, self._close)
        cycle.transport = outlet
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """A part of the body came."""
        self._has_body_come = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is whole."""
        self._has_ended = True
        self._stop_rest_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is whole, perhaps before the body."""
        super().on_response_complete()
        if self.cycle.more_body and self._farewell is None and not self.transport.is_closing():
            self._rest_timer = self.loop.call_later(self._limits.timeout_s, self.transport.abort)

    def shutdown(self) -> None:
        """The server stops; a farewell ends by itself."""
        if self._farewell is None:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, or a head that is over a limit, and closes."""
        if self._is_answering():
            self._go_deaf()
        else:
            self._refuse(400, msg)

    def _is_answering(self) -> bool:
        """Whether an answer is being made or written for a request that has come whole."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return bool(cycle.response_started or not cycle.more_body)

    def _go_deaf(self) -> None:
        self._is_deaf = True
        self._stop_head_timer()
        self.cycle.keep_alive = False

    def _give_up(self) -> None:
        """What comes is no body, and there is too much of it."""
        if not self._is_answering():
            self._refuse(431, "The request's trailers or chunk extensions are too large.")
        elif self.cycle.response_complete:
            self.transport.abort()
        else:
            self._go_deaf()

    def _check(self, is_within_limits: bool) -> None:
        if not is_within_limits:
            self._refuse(431, "The request's headers are too large.")
            raise httptools.HttpParserError("head over a limit")

    def _refuse(self, status: int, message: str) -> None:
        if self._is_deaf or self.transport.is_closing():
            return
        phrase = HTTPStatus(status).phrase
        code = phrase.lower().replace(" ", "_")
        body = Problem(status, "invalid_request_error", code, message).encode()
        request_id = valid_request_id(self.headers or ()).decode()
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.cycle is not None and not self.cycle.response_complete:
            # Whoever waits for the rest of the body waits in vain.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._say_farewell()

    def _close(self) -> None:
        """Closes behind an answer."""
        if self.cycle.more_body and not self.transport.is_closing():
            self._say_farewell()
        else:
            self.transport.close()

    def _say_farewell(self) -> None:
        self._is_deaf = True
        self._stop_head_timer()
        self.flow.resume_reading()
        self._farewell = Farewell(self.transport, self.loop)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._refuse(408, "The request's headers took too long to arrive.")
