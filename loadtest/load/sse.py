"""A chat over server-sent events, on a plain socket: with gevent's it costs one switch for each piece."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Mapping

import httptools
import orjson

from loadtest.load.answers import Answer
from streamserve.bench.http import MOST_OF_A_REFUSAL, Address, request_head
from streamserve.terminal.sse import EventDecoder

_PIECE = 65536


class StreamFailed(Exception):
    """There is no whole answer; the message says why.

    Attributes:
        retry_after_s: when the server says to come again; None if it says nothing.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SseClient:
    """One connection that is kept, as a browser does; a context manager.

    Args:
        address: of the endpoint.
        headers: of each request.
        timeout_s: for a whole answer.
    """

    def __init__(self, address: Address, headers: Mapping[str, str], timeout_s: float) -> None:
        self._address = address
        self._head = request_head(address, headers)
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None

    def ask(self, body: bytes, answer: Answer) -> int:
        """Sends a request and reads its stream to the end.

        Returns:
            Bytes of the answer's body.

        Raises:
            StreamFailed: it is refused, breaks off, reports an error or takes too long.
        """
        request = f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        is_kept = self._socket is not None
        reading = _Reading(answer)
        try:
            self._exchange(request, reading)
        except (OSError, httptools.HttpParserError) as error:
            self.close()
            # A kept connection may have been closed by the server meanwhile: nothing has come then. Where
            # the server is silent until the time is up, it has the request, and is not to get it twice.
            if is_kept and not reading.has_begun and not isinstance(error, TimeoutError):
                return self.ask(body, answer)
            raise StreamFailed(_reason(error)) from error
        except BaseException:
            self.close()
            raise
        if not reading.keeps_alive:
            self.close()
        reading.check()
        return reading.num_bytes

    def close(self) -> None:
        """Closes the connection; the next request makes a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, request: bytes, reading: _Reading) -> None:
        connection = self._socket or connect(self._address, self._timeout_s)
        self._socket = connection
        deadline = time.perf_counter() + self._timeout_s
        connection.sendall(request)
        while not reading.is_over:
            data = connection.recv(_PIECE)
            if not data:
                raise ConnectionError("the server closed the connection before the end of the answer")
            now = time.perf_counter()
            if now > deadline:
                raise TimeoutError("no whole answer in time")
            reading.feed(now, data)


class _Reading:
    """One answer, as httptools' protocol."""

    def __init__(self, answer: Answer) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.is_over = self.keeps_alive = False
        self.has_begun = False
        self.num_bytes = 0
        self._answer = answer
        self._decoder = EventDecoder()
        self._refusal = bytearray()
        self._is_done = False
        self._now = 0.0
        self._retry_after_s: float | None = None

    def feed(self, now: float, data: bytes) -> None:
        """Takes in what came at `now`. Hot."""
        self._now = now
        self.has_begun = True
        self.parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each header."""
        if name.lower() == b"retry-after":
            # The other form that HTTP knows is a date.
            with contextlib.suppress(ValueError):
                self._retry_after_s = float(value)

    def on_body(self, body: bytes) -> None:
        """Called by the parser for each piece. Hot."""
        self.num_bytes += len(body)
        if self.parser.get_status_code() != 200:
            self._refusal += body[: MOST_OF_A_REFUSAL - len(self._refusal)]
            return
        for event in self._decoder.decode(body):
            if event.data == "[DONE]":
                self._is_done = True
            else:
                self._answer.chunk(self._now, orjson.loads(event.data))

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the answer."""
        self.is_over = True
        # A moment later the parser has forgotten.
        self.keeps_alive = self.parser.should_keep_alive()

    def check(self) -> None:
        """Raises StreamFailed unless the answer is whole."""
        status = self.parser.get_status_code()
        if status != 200:
            message = f"HTTP {status}: {refusal_message(bytes(self._refusal))}"
            raise StreamFailed(message, self._retry_after_s)
        self._answer.finish()
        if self._answer.problem:
            raise StreamFailed(self._answer.problem)
        if not self._is_done:
            raise StreamFailed("the stream broke off before [DONE]")


def _reason(error: Exception) -> str:
    if isinstance(error, httptools.HttpParserCallbackError):
        return f"the stream has an event that is no chunk: {error.__context__ or error}"
    return str(error) or type(error).__name__


def refusal_message(body: bytes) -> str:
    """What the body of a refusal says to a person."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(orjson.loads(body)["error"]["message"])
    return body[:200].decode(errors="replace")


def connect(address: Address, timeout_s: float) -> socket.socket:
    """A connection to the server.

    Raises:
        OSError: nobody listens, or the certificate is not valid.
    """
    connection = socket.create_connection((address.host, address.port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if address.is_secure:
        return ssl.create_default_context().wrap_socket(connection, server_hostname=address.host)
    return connection
