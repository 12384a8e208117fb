"""Server-sent events: the bytes of each chunk, and the response that sends them.

A chunk is a few byte strings made once for a request, and the delta's text as JSON between them: no model
object, no dict and no string formatting for each token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from streamserve.frontend.api.problems import Problem

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
WRITE_TIMEOUT_S = 120.0
# The name under which the HTTP protocol offers to drop a connection at once (streamserve.frontend.protocol).
ABORT_EXTENSION = "streamserve.abort"

# Characters that JSON allows in a string but that many clients take for the end of a line.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def json_text(text: str) -> bytes:
    """`text` as a JSON string on one line, whatever the reader takes for a line. Hot: once a chunk."""
    encoded = orjson.dumps(text)
    if not text.isascii():
        for raw, escaped in _LINE_ENDS:
            encoded = encoded.replace(raw, escaped)
    return encoded


def event(encoded: bytes) -> bytes:
    """One event whose data is the JSON text `encoded`."""
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return b"data: " + encoded + b"\n\n"


def error_event(problem: Problem) -> bytes:
    """The last event of a stream that failed after it had started. No `[DONE]` follows."""
    return event(problem.encode())


class Chunks:
    """The chunks of one stream.

    Args:
        head: the members that all chunks of the stream share: id, object, created, model.
        text_path: where the text goes: `("delta", "content")` or `("text",)`.
        include_usage: every chunk names `usage`, and a last one has it.
    """

    def __init__(self, head: dict[str, Any], text_path: tuple[str, ...], *, include_usage: bool) -> None:
        self._head = head
        self._text_path = text_path
        self._include_usage = include_usage
        mark = "\x00text\x00"
        before, after = self._choice(mark, None, None).split(orjson.dumps(mark))
        self._before, self._after = before, after

    def role(self) -> bytes:
        """The first chunk of a chat answer."""
        return self._event({"delta": {"role": "assistant", "content": ""}}, None, None)

    def text(self, text: str) -> bytes:
        """A chunk of text. Hot: once for each delta."""
        return self._before + json_text(text) + self._after

    def finish(self, reason: str, stop_reason: str | int | None) -> bytes:
        """The chunk that says why the text ended; it has none itself."""
        empty: dict[str, Any] = {"delta": {}} if self._text_path[0] == "delta" else {"text": ""}
        return self._event(empty, reason, stop_reason)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk with the token counts, if it was asked for."""
        if not self._include_usage:
            return b""
        return event(orjson.dumps({**self._head, "choices": [], "usage": usage}))

    def _choice(self, text: str, reason: str | None, stop_reason: str | int | None) -> bytes:
        body: Any = text
        for name in reversed(self._text_path):
            body = {name: body}
        return self._event(body, reason, stop_reason)

    def _event(self, body: dict[str, Any], reason: str | None, stop_reason: str | int | None) -> bytes:
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": reason}
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        chunk = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return event(orjson.dumps(chunk))


class EventStream(EventSourceResponse):
    """Sends ready-made events; stops when the client is gone, or has not read for too long.

    What differs from the base class, and why:

    * chunks are bytes already, and are neither converted nor logged; one timer for the stream watches all
      sends instead of one for each;
    * a ping is sent only into silence;
    * a client that has stopped reading has its connection dropped: closing it in the ordinary way would
      wait for it to read what is buffered;
    * shutting down is not noticed here: the streams themselves are ended with an error event when the drain
      time is over (streamserve.frontend.process), and until then go on.

    Args:
        first: what `events` gave already.
        events: the rest of the body; closed in any case.
        ping_interval_s: silence after which a comment is sent.
        write_timeout_s: how long one send may wait for the client to read.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        *,
        ping_interval_s: float,
        write_timeout_s: float,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, ping=ping_interval_s, sep="\n")
        # HTTP/1.1 connections stay open anyway, and a draining server must be able to say "close".
        del self.headers["Connection"]
        self._first = first
        self._events = events
        self._write_timeout_s = write_timeout_s
        self._last_send_s = time.monotonic()
        self._is_sending = False
        self._is_stuck = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
            if self._is_stuck and abort is not None:
                abort["call"]()
                # So that the server has seen the connection go before it looks at this unfinished response.
                await asyncio.sleep(0)

    async def _stream_response(self, send: Send) -> None:
        headers = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(headers)
        await self._send(send, self._first)
        async for chunk in self._events:
            await self._send(send, chunk)
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})

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
