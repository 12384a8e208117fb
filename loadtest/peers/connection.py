"""A streamed HTTP request, read with as little work as can be: pieces of the body and when they came.

While servers are measured the client must cost next to nothing, since it shares the machine with them. So
nothing is parsed here but HTTP itself, in C; what the pieces say is found out after the race
(`loadtest.peers.streams`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast

import httptools

HOST = "127.0.0.1"


@dataclass(slots=True)
class Exchange:
    """One request and what came back. Times are of `time.perf_counter`.

    Attributes:
        sent: when the request was written.
        pieces: time and bytes of each piece of the body.
        status: of the answer; 0 before it came.
        ended: the body came to its end.
        problem: why there is no whole answer; empty if there is, or was cut off on purpose.
    """

    sent: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    status: int = 0
    ended: bool = False
    problem: str = ""


class StreamingRequest(asyncio.Protocol):
    """Sends one POST on a connection of its own.

    Args:
        path: of the URL.
        body: JSON.
    """

    def __init__(self, path: str, body: bytes) -> None:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._now = 0.0
        self.exchange = Exchange()
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self.exchange.sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        """Called by the parser for each piece."""
        self.exchange.pieces.append((self._now, body))
        if not self.begun.done():
            self.begun.set_result(None)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the answer."""
        self.exchange.ended = True
        self._finish("")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._finish("the connection was lost before the end of the answer")

    def drop(self) -> None:
        """Closes the connection in the midst of the answer."""
        self._finish("")

    def _finish(self, problem: str) -> None:
        self.exchange.status = self._parser.get_status_code()
        if not self.done.done():
            self.exchange.problem = problem
            self.done.set_result(None)
        if not self.begun.done():
            self.begun.set_result(None)
        if self._transport is not None:
            self._transport.close()


async def open_request(port: int, path: str, body: bytes) -> StreamingRequest:
    """Connects and sends.

    Raises:
        OSError: nobody listens at `port`.
    """
    loop = asyncio.get_running_loop()
    _, request = await loop.create_connection(lambda: StreamingRequest(path, body), HOST, port)
    return request
