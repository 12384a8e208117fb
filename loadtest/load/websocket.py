"""Many chats over one WebSocket (`/v1/ws`): the protocol of `websockets`, on a plain socket."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from loadtest.load.answers import Answer
from loadtest.load.sse import StreamFailed, connect
from streamserve.bench.http import Address

_PIECE = 65536
_LONGEST_MESSAGE = 1 << 24


@dataclass(slots=True)
class _Pending:
    answer: Answer
    num_bytes: int = 0
    problem: str = ""
    retry_after_s: float | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


class WebSocketClient:
    """One connection; a thread (a greenlet under gevent) reads it.

    Args:
        address: of the endpoint.
        headers: of the handshake.
        timeout_s: for a whole answer.

    Raises:
        StreamFailed: there is no connection, or it is refused.
    """

    def __init__(self, address: Address, headers: Mapping[str, str], timeout_s: float) -> None:
        scheme = "wss" if address.is_secure else "ws"
        uri = parse_uri(f"{scheme}://{address.netloc}{address.path}")
        self._protocol = ClientProtocol(uri, max_size=_LONGEST_MESSAGE)
        self._timeout_s = timeout_s
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count()
        self._closed_because = ""
        # A long message leaves in pieces, between which another would come.
        self._sending = threading.Lock()
        try:
            self._socket = connect(address, timeout_s)
        except OSError as error:
            raise StreamFailed(f"no WebSocket: {error}") from error
        try:
            self._shake_hands(headers)
        except (OSError, EOFError, InvalidHandshake) as error:
            self._socket.close()
            raise StreamFailed(f"no WebSocket: {error or type(error).__name__}") from error
        self._reader = threading.Thread(target=self._read, name="websocket", daemon=True)
        self._reader.start()

    @property
    def is_open(self) -> bool:
        """Requests may be sent."""
        return not self._closed_because

    def ask(self, body: Mapping[str, Any], answer: Answer) -> int:
        """Sends a request and waits for the end of its stream; several may be under way.

        Returns:
            Bytes of its messages.

        Raises:
            StreamFailed: it is refused, breaks off, reports an error or takes too long.
        """
        number = next(self._ids)
        pending = self._pending[number] = _Pending(answer, problem=self._closed_because)
        if self._closed_because:
            pending.is_over.set()
        try:
            self._send({"type": "create", "id": number, "endpoint": "chat.completions", "body": body})
            if not pending.is_over.wait(self._timeout_s):
                pending.problem = "no whole answer in time"
        except OSError as error:
            pending.problem = pending.problem or str(error)
        finally:
            del self._pending[number]
            if not pending.is_over.is_set():
                with contextlib.suppress(OSError):
                    self._send({"type": "cancel", "id": number})
        if not pending.problem:
            answer.finish()
        if problem := pending.problem or answer.problem:
            raise StreamFailed(problem, pending.retry_after_s)
        return pending.num_bytes

    def close(self) -> None:
        """Ends the connection and all that is under way."""
        with contextlib.suppress(OSError):
            with self._sending:
                if self._protocol.state is State.OPEN:
                    self._protocol.send_close(1001)
                    self._flush()
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _shake_hands(self, headers: Mapping[str, str]) -> None:
        request = self._protocol.connect()
        for name, value in headers.items():
            request.headers[name] = value
        self._protocol.send_request(request)
        self._flush()
        while self._protocol.state is State.CONNECTING:
            data = self._socket.recv(_PIECE)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._protocol.receive_data(data)
            if self._protocol.handshake_exc is not None:
                raise self._protocol.handshake_exc

    def _send(self, message: Mapping[str, Any]) -> None:
        data = orjson.dumps(message)
        with self._sending:
            if self._protocol.state is State.OPEN:
                self._protocol.send_text(data)
                self._flush()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._socket.sendall(data)

    def _read(self) -> None:
        problem = "the server closed the connection"
        try:
            # Silence is no failure of the connection: each request has its own limit.
            self._socket.settimeout(None)
            self._handle(time.perf_counter())
            while data := self._socket.recv(_PIECE):
                now = time.perf_counter()
                self._protocol.receive_data(data)
                if self._handle(now):
                    with self._sending:
                        self._flush()
        except (OSError, ValueError, LookupError, TypeError) as error:
            problem = str(error) or type(error).__name__
        finally:
            if self._protocol.close_rcvd is not None:
                problem = f"the server closed with {self._protocol.close_rcvd.code}"
            self._closed_because = problem
            for pending in list(self._pending.values()):
                pending.problem = problem
                pending.is_over.set()

    def _handle(self, now: float) -> bool:
        """Gives what came at `now` to those who wait for it. Hot: once for each message.

        Returns:
            There may be something to send, as after a ping.
        """
        is_asked = False
        for event in self._protocol.events_received():
            # The server sends each message as one frame.
            if not isinstance(event, Frame) or event.opcode is not Opcode.TEXT:
                is_asked = True
                continue
            message = orjson.loads(event.data)
            pending = self._pending.get(message.get("id"))
            if pending is None:
                continue
            pending.num_bytes += len(event.data)
            kind = message["type"]
            if kind == "chunk":
                pending.answer.chunk(now, message["chunk"])
            elif kind == "done":
                pending.is_over.set()
            else:
                error = message["error"]
                pending.problem = f"{error.get('status', '')} {error['message']}".strip()
                pending.retry_after_s = error.get("retry_after")
                pending.is_over.set()
        return is_asked
