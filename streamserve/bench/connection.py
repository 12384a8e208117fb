"""HTTP/1.1 connections that note when each piece of a body came.

A client that is busy itself measures its own queue. So the reading side is httptools in the event loop's
callback: no stream objects, no task that is woken for a piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from typing import cast

import httptools

from streamserve.bench.http import MOST_OF_A_REFUSAL, Address, Answer, OnBody, request_head
from streamserve.bench.timing import Clock


class Connection(asyncio.Protocol):
    """One connection, for one request at a time.

    Args:
        clock: tells the time of the run.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._on_body: OnBody = _ignore
        self._now = 0.0
        self._refusal = bytearray()
        self._done: asyncio.Future[Answer] | None = None
        self._keeps_alive = False
        self.has_answered = False

    @property
    def is_reusable(self) -> bool:
        """Another request may be sent."""
        return self._keeps_alive and self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes, on_body: OnBody) -> Answer:
        """Sends a request.

        Args:
            request: head and body.
            on_body: called with time and bytes of each piece of the body, if the status is 200.

        Returns:
            The answer, after its end.

        Raises:
            ConnectionError: the connection was lost before the end, or what came is no HTTP.
        """
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._on_body, self._keeps_alive, self.has_answered = on_body, False, False
        self._refusal.clear()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._on_body = _ignore

    def close(self) -> None:
        """Closes it; an answer that is under way is dropped."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"what came is no HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        """Called by the parser for each piece. Hot."""
        if self._parser.get_status_code() == 200:
            self._on_body(self._now, body)
        elif len(self._refusal) < MOST_OF_A_REFUSAL:
            self._refusal += body

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the answer."""
        self._keeps_alive = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(Answer(self._parser.get_status_code(), bytes(self._refusal)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(
            ConnectionError(str(exc or "the server closed the connection before the end of the answer"))
        )

    def _fail(self, error: ConnectionError) -> None:
        self._keeps_alive = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


def _ignore(_now: float, _data: bytes) -> None:
    pass


class ConnectionPool:
    """The connections of a run; an async context manager that closes them.

    Args:
        address: of the endpoint.
        headers: of each request.
        clock: tells the time of the run.
        verifies: the server's certificate has to be valid.
    """

    def __init__(
        self, address: Address, headers: Mapping[str, str], clock: Clock, verifies: bool = True
    ) -> None:
        self._address = address
        self._clock = clock
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if address.is_secure else None
        if self._tls is not None and not verifies:
            self._tls.check_hostname = False
            self._tls.verify_mode = ssl.CERT_NONE
        self._head = request_head(address, headers)

    async def __aenter__(self) -> ConnectionPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def post(self, body: bytes, request_id: str, on_body: OnBody) -> Answer:
        """Sends one request and returns its answer after its end.

        Raises:
            OSError: there is no connection, or it was lost.
        """
        extra = f"X-Request-Id: {request_id}\r\n" if request_id else ""
        request = f"{self._head}{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                # The server may be closing it at this moment. Then nothing was answered, and a new one is
                # made.
                with contextlib.suppress(ConnectionError):
                    return await self._send(connection, request, on_body)
                if connection.has_answered:
                    raise ConnectionError("the connection was lost before the end of the answer")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._clock), self._address.host, self._address.port, ssl=self._tls
        )
        return await self._send(connection, request, on_body)

    async def _send(self, connection: Connection, request: bytes, on_body: OnBody) -> Answer:
        try:
            answer = await connection.send(request, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer
