"""Many requests and streams over one WebSocket, for the blocking client."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from streamserve_client.endpoints import Call
from streamserve_client.errors import AnswerTimeout, ClientError, InvalidAnswer
from streamserve_client.place import Place
from streamserve_client.settings import Settings
from streamserve_client.socket_messages import PING, Item, Multiplexer, closing_reason, opening_failure


class SocketTransport:
    """Opens a connection for the first request, and another one when that is lost.

    Args:
        settings: where the server is.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._opening = threading.Lock()
        self._connection: Connection | None = None
        self._is_closed = False

    def answer(self, call: Call) -> dict[str, Any]:
        """The answer in one piece.

        Raises:
            ClientError: there is none.
        """
        with closing(self.events(call, Place(call, is_kept=False))) as events:
            documents = [event for event in events if event is not None]
        if len(documents) != 1:
            raise InvalidAnswer(f"the server gave {len(documents)} answers to one request")
        return documents[0]

    def events(self, call: Call, place: Place) -> Generator[dict[str, Any] | None]:
        """The JSON objects of an answer, and None behind the last one.

        Raises:
            ClientError: it broke, or there is none.
        """
        yield from self._connected().events(call, place)

    def close(self) -> None:
        """Closes the connection, and so ends all streams."""
        with self._opening:
            self._is_closed = True
            if self._connection is not None:
                self._connection.close()

    def _connected(self) -> Connection:
        with self._opening:
            if self._is_closed:
                raise ClientError("the client is closed")
            if self._connection is None or self._connection.is_lost:
                self._connection = self._open()
            return self._connection

    def _open(self) -> Connection:
        timeouts = self._settings.timeouts
        half_s = None if timeouts.idle_s is None else timeouts.idle_s / 2
        with contextlib.ExitStack() as opened:
            try:
                manager = connect(
                    self._settings.socket_url,
                    additional_headers=self._settings.headers,
                    compression=None,
                    open_timeout=timeouts.connect_s,
                    ping_interval=half_s,
                    ping_timeout=half_s,
                    max_size=None,
                )
                socket = opened.enter_context(manager)
            except (OSError, WebSocketException) as error:
                raise opening_failure(error) from error
            return Connection(socket, opened.pop_all(), timeouts.answer_s)


class Connection:
    """One WebSocket. A thread reads it and gives each message to its stream.

    Messages wait for their streams without a limit: one that is read slowly does not hold up the others, and
    no answer is longer than the model's context.

    Args:
        socket: is read and written.
        opened: closes it.
        answer_s: how long a stream waits for its first message.
    """

    def __init__(
        self, socket: ClientConnection, opened: contextlib.ExitStack, answer_s: float | None
    ) -> None:
        self._socket = socket
        self._opened = opened
        self._answer_s = answer_s
        self._streams = Multiplexer()
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="streamserve-client", daemon=True)
        self._reader.start()

    @property
    def is_lost(self) -> bool:
        """No more can be asked over it."""
        return self._streams.is_lost

    def events(self, call: Call, place: Place) -> Generator[dict[str, Any] | None]:
        """The objects of one answer, and None behind the last one. Hot: one turn a chunk."""
        inbox: SimpleQueue[Item] = SimpleQueue()
        stream_id = self._begin(call, place, inbox)
        timeout_s = self._answer_s
        try:
            while True:
                item = self._next(inbox, timeout_s)
                if isinstance(item, ClientError):
                    raise item
                yield item
                if item is None:
                    return
                timeout_s = None
        finally:
            cancel = self._streams.leave(stream_id)
            if cancel is not None:
                with contextlib.suppress(ConnectionClosed):
                    self._socket.send(cancel)

    def close(self) -> None:
        """Ends it and all its streams."""
        with contextlib.suppress(ConnectionClosed):
            for cancel in self._streams.leave_all("the client was closed"):
                self._socket.send(cancel)
        self._opened.close()
        self._reader.join()

    def _begin(self, call: Call, place: Place, inbox: SimpleQueue[Item]) -> int:
        with self._sending:
            stream_id, create = self._streams.open(call, place, inbox)
            # The reader notices as well, and tells the streams why.
            with contextlib.suppress(ConnectionClosed):
                self._socket.send(create)
                self._socket.send(PING)
        return stream_id

    @staticmethod
    def _next(inbox: SimpleQueue[Item], timeout_s: float | None) -> Item:
        try:
            return inbox.get(timeout=timeout_s)
        except Empty:
            raise AnswerTimeout("the answer did not begin in time (Timeouts.answer_s)") from None

    def _read(self) -> None:
        reason, code = "the connection broke", None
        try:
            while True:
                self._streams.take(self._socket.recv())
        except ConnectionClosed as error:
            reason, code = closing_reason(error)
        except InvalidAnswer as error:
            reason = str(error)
        finally:
            # Whatever ended this, nothing more comes.
            self._streams.lose(reason, code)
        self._socket.close()
