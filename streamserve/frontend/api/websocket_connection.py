"""One WebSocket connection: texts in, texts out, tasks in between, and how it all ends.

    socket = Socket(scope, receive, send)
    await socket.serve(handle, draining)

`handle` gets each text and may start tasks with `start`. However the connection ends (the client closes or is
gone, it breaks the rules, the server stops), all tasks are cancelled and done before `serve` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from streamserve.frontend.api.body import checked_object, small_object
from streamserve.frontend.api.endpoint import tenant_of
from streamserve.frontend.api.resume import reach_of
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.structure import SMALL_BYTES

logger = logging.getLogger(__name__)


class Close(NamedTuple):
    """A close code (RFC 6455) and the words that go with it."""

    code: int
    reason: str


GOING_AWAY = Close(1001, "the server is shutting down")
NOT_TEXT = Close(1003, "only text messages are understood")
INTERNAL_ERROR = Close(1011, "internal error")


class Gone(Exception):
    """The connection is over; nobody reads what is sent."""


class Socket:
    """One connection, as its application sees it.

    Attributes:
        tenant: name of the API key that it was opened with.
        reach: whose streams it may have (streamserve.frontend.api.resume.reach_of).
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.tenant = tenant_of(scope)
        self.reach = reach_of(scope)
        self._subprotocols: list[str] = scope.get("subprotocols", [])
        self._receive = receive
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._is_closed = False

    async def serve(self, handle: Callable[[bytes], Awaitable[None]], draining: asyncio.Event) -> None:
        """Accepts the connection and serves it to its end.

        Args:
            handle: what is done with each text.
            draining: once set, the connection is closed when no task runs any more.
        """
        if (await self._receive())["type"] != "websocket.connect":
            return
        # A browser that offered some gives up a connection that takes none.
        subprotocol = self._subprotocols[0] if self._subprotocols else None
        with contextlib.suppress(OSError):
            await self._send({"type": "websocket.accept", "subprotocol": subprotocol})
        async with asyncio.TaskGroup() as self._group:
            closer = self._group.create_task(self._close_when_drained(draining))
            close = await self._read(handle)
            for task in (closer, *self._tasks):
                task.cancel()
        if close is not None:
            await self._close(close)

    async def send(self, text: bytes) -> None:
        """Sends one message, when there is room for it. Hot: once a chunk.

        Raises:
            Gone: the connection is over.
        """
        if self._is_closed:
            raise Gone
        try:
            await self._send({"type": "websocket.send", "text": text.decode()})
        except OSError:
            raise Gone from None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which must not fail, until the connection ends. A stopping server waits for it."""
        assert self._group is not None, "a task before the connection was accepted"
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_when_drained(self, draining: asyncio.Event) -> None:
        await draining.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._close(GOING_AWAY)

    async def _read(self, handle: Callable[[bytes], Awaitable[None]]) -> Close | None:
        """Handles messages until the connection ends; says how to close it, if it is not closed yet."""
        while True:
            event = await self._receive()
            if event["type"] == "websocket.disconnect":
                self._is_closed = True
                return None
            text = event.get("text")
            if text is None:
                return NOT_TEXT
            try:
                await handle(text.encode())
            except Gone:
                return None
            except Exception:
                logger.exception("a WebSocket message could not be handled")
                return INTERNAL_ERROR

    async def _close(self, close: Close) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            await self._send({"type": "websocket.close", "code": close.code, "reason": close.reason})


async def parse_message(text: bytes, service: Service) -> dict[str, Any]:
    """The JSON object in a message.

    Raises:
        InvalidRequest: it is none, too rich, or nested too deeply.
        RequestError: it is longer than any request that could be served.
    """
    if len(text) <= SMALL_BYTES:
        # Without an engine, too: what a message is for must be known to answer it well.
        return small_object(text)
    limit = service.body_limit()
    if len(text) > limit.max_bytes:
        raise limit.error
    return await checked_object(text, limit)
