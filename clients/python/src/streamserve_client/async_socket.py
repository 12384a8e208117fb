"""Many requests and streams over one WebSocket, for the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from streamserve_client.endpoints import Call
from streamserve_client.errors import AnswerTimeout, ClientError, InvalidAnswer
from streamserve_client.place import Place
from streamserve_client.settings import Settings
from streamserve_client.socket_messages import PING, Item, Multiplexer, closing_reason, opening_failure


class AsyncSocketTransport:
    """Opens a connection for the first request, and another one when that is lost.

    Args:
        settings: where the server is.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._opening = asyncio.Lock()
        self._connection: Connection | None = None
        self._is_closed = False

    async def answer(self, call: Call) -> dict[str, Any]:
        """The answer in one piece.

        Raises:
            ClientError: there is none.
        """
        async with aclosing(self.events(call, Place(call, is_kept=False))) as events:
            documents = [event async for event in events if event is not None]
        if len(documents) != 1:
            raise InvalidAnswer(f"the server gave {len(documents)} answers to one request")
        return documents[0]

    async def events(self, call: Call, place: Place) -> AsyncGenerator[dict[str, Any] | None]:
        """The JSON objects of an answer, and None behind the last one.

        Raises:
            ClientError: it broke, or there is none.
        """
        connection = await self._connected()
        async with aclosing(connection.events(call, place)) as events:
            async for event in events:
                yield event

    async def close(self) -> None:
        """Closes the connection, and so ends all streams."""
        async with self._opening:
            self._is_closed = True
            if self._connection is not None:
                await self._connection.close()

    async def _connected(self) -> Connection:
        async with self._opening:
            if self._is_closed:
                raise ClientError("the client is closed")
            if self._connection is None or self._connection.is_lost:
                self._connection = Connection(await self._open(), self._settings.timeouts.answer_s)
            return self._connection

    async def _open(self) -> ClientConnection:
        timeouts = self._settings.timeouts
        half_s = None if timeouts.idle_s is None else timeouts.idle_s / 2
        try:
            return await connect(
                self._settings.socket_url,
                additional_headers=self._settings.headers,
                compression=None,
                open_timeout=timeouts.connect_s,
                ping_interval=half_s,
                ping_timeout=half_s,
                max_size=None,
            )
        except (OSError, WebSocketException) as error:
            raise opening_failure(error) from error


class Connection:
    """One WebSocket. A task reads it and gives each message to its stream.

    Messages wait for their streams without a limit: one that is read slowly does not hold up the others, and
    no answer is longer than the model's context.
    """

    def __init__(self, socket: ClientConnection, answer_s: float | None) -> None:
        self._socket = socket
        self._answer_s = answer_s
        self._streams = Multiplexer()
        self._sending = asyncio.Lock()
        # Ends with the socket, which close() closes.
        self._reader = asyncio.create_task(self._read())

    @property
    def is_lost(self) -> bool:
        """No more can be asked over it."""
        return self._streams.is_lost

    async def events(self, call: Call, place: Place) -> AsyncGenerator[dict[str, Any] | None]:
        """The objects of one answer, and None behind the last one. Hot: one turn a chunk."""
        inbox: asyncio.Queue[Item] = asyncio.Queue()
        stream_id = None
        timeout_s = self._answer_s
        try:
            async with self._sending:
                stream_id, create = self._streams.open(call, place, inbox)
                await self._begin(create)
            while True:
                item = await self._next(inbox, timeout_s)
                if isinstance(item, ClientError):
                    raise item
                yield item
                if item is None:
                    return
                timeout_s = None
        finally:
            cancel = None if stream_id is None else self._streams.leave(stream_id)
            if cancel is not None:
                with contextlib.suppress(ConnectionClosed):
                    await self._socket.send(cancel)

    async def close(self) -> None:
        """Ends it and all its streams."""
        with contextlib.suppress(ConnectionClosed):
            for cancel in self._streams.leave_all("the client was closed"):
                await self._socket.send(cancel)
        await self._socket.close()
        await self._reader

    async def _begin(self, create: str) -> None:
        # The reader notices as well, and tells the streams why.
        with contextlib.suppress(ConnectionClosed):
            try:
                await self._socket.send(create)
            finally:
                # Also if cancelled meanwhile: the one belongs to the other.
                await self._socket.send(PING)

    @staticmethod
    async def _next(inbox: asyncio.Queue[Item], timeout_s: float | None) -> Item:
        try:
            async with asyncio.timeout(timeout_s):
                return await inbox.get()
        except TimeoutError:
            raise AnswerTimeout("the answer did not begin in time (Timeouts.answer_s)") from None

    async def _read(self) -> None:
        reason, code = "the connection broke", None
        try:
            while True:
                self._streams.take(await self._socket.recv())
        except ConnectionClosed as error:
            reason, code = closing_reason(error)
        except InvalidAnswer as error:
            reason = str(error)
        finally:
            # Whatever ended this, nothing more comes.
            self._streams.lose(reason, code)
        await self._socket.close()
