"""uvicorn's WebSocket protocol, with this server's idea of slow clients, of silence and of stopping.

What differs from the base class, and why:

* A client that does not read is closed with 1008 once the buffer has stood still for the write timeout. The
  timer runs only while the buffer is full, so a message that is written at once pays nothing for it.
* A pong may stand behind data that a slow client has yet to read: after data, the client has the write
  timeout for its pong. Anything that it sends counts as one. Before a connection is given up the loop gets
  the chance to read once more: where it was blocked itself, the pong may be there already.
* Closing ends. The base class waits without limit for a client to read what is buffered; here the connection
  is dropped when the time for the closing handshake is over.
* A client that is told to go may be sending for a while yet, and reads why only then. The base class closes
  the connection behind a fault of the client, which resets it under what still comes, and the reason is
  lost. Here all that comes is thrown away, within bounds (streamserve.frontend.farewell).
* A head with which the library cannot begin is answered. The base class says nothing, and waits.
* On shutdown no close frame falls into the middle of streams: the application closes when they are over.
* Whoever sends after the end, for whatever reason it ended, gets the OSError that ASGI prescribes.
* The pieces of a fragmented message are joined as they come, and while the buffer is full only the last ping
  is answered: neither many small pieces nor many pings make a client expensive.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.frames import Frame
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS, Response

from streamserve.frontend.api.problems import Problem
from streamserve.frontend.farewell import MAX_S, Farewell

SLOW, SILENT = (1008, "slow consumer"), (1011, "no pong")
NO_TEXT = (1007, "not UTF-8")
GOING_AWAY = (1001, "the server is shutting down")
CLOSE_TIMEOUT_S = 5.0
# A draining server does not wait long for clients that are slow to say goodbye, and ends connections so much
# earlier than uvicorn would cancel them.
DRAIN_CLOSE_TIMEOUT_S = 1.0
END_BEFORE_S = 1.5

_BAD_HEAD = Problem(
    431,
    "invalid_request_error",
    "request_header_fields_too_large",
    f"A request for a WebSocket may have {MAX_NUM_HEADERS} headers of {MAX_LINE_LENGTH} bytes each.",
)


class StreamSocketProtocol(WebSocketsSansIOProtocol):
    """One connection.

    Args:
        write_timeout_s: how long a client may leave the buffer full, or unread data in front of a pong.
    """

    def __init__(self, *args: Any, write_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = CLOSE_TIMEOUT_S
        self._write_timeout_s = write_timeout_s
        self._stuck_timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._late_pong = b""
        # Of a message, behind its first piece.
        self._pieces = bytearray()
        # Once the server has closed from its side.
        self._farewell: Farewell | None = None
        # Nothing that still comes can be understood.
        self._is_deaf = False
        self._is_draining = False
        # Since the last pong.
        self._has_sent = False
        self._has_heard = False
        self._is_last_call = False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_stuck_timer()
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        if self._farewell is not None:
            self._farewell.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._has_heard = True
        if self._farewell is not None:
            self._farewell.hear(len(data))
        if not self._is_deaf:
            super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated and not self._is_deaf:
            self._refuse_head()

    def handle_cont(self, event: Frame) -> None:
        """A further piece of a message came."""
        if self.close_sent:
            return
        self._pieces += event.data
        if event.fin:
            self.frames.append(bytes(self._pieces))
            self._pieces.clear()
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """A message is whole. One that is no text though it says so is the client's fault, and no news."""
        if not self.close_sent and self.curr_msg_data_type == "text":
            try:
                text = b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.conn.send_close(*NO_TEXT)
                self.handle_parser_exception()
                return
            finally:
                self.frames = []
            self.queue.put_nowait({"type": "websocket.receive", "text": text})
            if not self.read_paused:
                self.read_paused = True
                self.transport.pause_reading()
            return
        super().send_receive_event_to_app()

    def pause_writing(self) -> None:
        """The buffer is full."""
        super().pause_writing()
        self._stuck_timer = self.loop.call_later(self._write_timeout_s, self._end, *SLOW)

    def resume_writing(self) -> None:
        """The buffer has room again."""
        self._stop_stuck_timer()
        super().resume_writing()
        if self._late_pong:
            self.transport.write(self._late_pong)
            self._late_pong = b""

    async def send(self, message: Any) -> None:
        """What the application sends. Hot: once a message.

        Raises:
            ClientDisconnected: the connection is closed or closing; an OSError.
        """
        await super().send(message)
        if message["type"] == "websocket.send":
            self._has_sent = True
        elif message["type"] == "websocket.close" and self._farewell is None:
            self._say_farewell()

    def handle_ping(self) -> None:
        """A ping came; the answer is ready."""
        output = self.conn.data_to_send()
        if self.writable.is_set():
            self.transport.write(b"".join(output))
        elif output:
            self._late_pong = output[-1]

    def send_keepalive_ping(self) -> None:
        """It is time to ask whether somebody is there."""
        self._has_heard = self._is_last_call = False
        super().send_keepalive_ping()

    def handle_pong(self, event: Frame) -> None:
        """A pong came."""
        super().handle_pong(event)
        self._has_sent = False

    def keepalive_timeout(self) -> None:
        """No pong has come in time."""
        if self.close_sent or self.transport.is_closing():
            return
        if self._has_heard:
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        limit_s = max(self._ping_timeout_s, self._write_timeout_s if self._has_sent else 0.0)
        left_s = self.ping_sent_at + limit_s - self.loop.time()
        if left_s > 0 or not self._is_last_call:
            self._is_last_call = left_s <= 0
            delay_s = left_s if left_s > 0 else min(1.0, self._ping_timeout_s)
            self.pong_timer = self.loop.call_later(delay_s, self.keepalive_timeout)
            return
        self._end(*(SLOW if self._has_sent else SILENT))

    def handle_close(self, event: Frame) -> None:
        """The client closes, or has answered a close."""
        super().handle_close(event)
        if self._farewell is not None:
            self._farewell.stop()
        self._drop_soon(self.close_timeout)

    def handle_parser_exception(self) -> None:
        """The client sent what is no WebSocket, or too much; a close frame says which."""
        self._is_deaf = True
        if self.close_sent:
            # It was told to go for another reason, which counts; now its answer will not be heard.
            if self._farewell is not None:
                self._farewell.half_close()
            return
        close = self.conn.close_sent
        assert close is not None, "a fault without a close frame"
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self._say_farewell()

    def shutdown(self) -> None:
        """The server stops."""
        self._is_draining = True
        self.close_timeout = DRAIN_CLOSE_TIMEOUT_S
        if self.close_sent:
            self._drop_soon(self.close_timeout)
        elif self.handshake_complete:
            # The application knows, and closes when its streams are over. What is left at the end of the
            # time waits for a client that does not read.
            limit_s = self.config.timeout_graceful_shutdown
            # Called when draining begins, and again when uvicorn knows how long it will wait.
            if limit_s is not None and self._drain_timer is None:
                self._drain_timer = self.loop.call_later(limit_s - END_BEFORE_S, self._end, *GOING_AWAY)
        else:
            super().shutdown()

    @property
    def _ping_timeout_s(self) -> float:
        return self._write_timeout_s if self.ping_timeout is None else self.ping_timeout

    def _end(self, code: int, reason: str) -> None:
        """Closes from this side, whether or not the client reads."""
        if self.close_sent or self.transport.is_closing():
            self.transport.abort()
            return
        self.conn.send_close(code, reason)
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self._say_farewell()

    def _refuse_head(self) -> None:
        """Answers a request that the HTTP side took and the library for WebSockets does not."""
        body = _BAD_HEAD.encode()
        names = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        status = HTTPStatus(_BAD_HEAD.status)
        self.transport.write(Response(status.value, status.phrase, Headers(names), body).serialize())
        self._is_deaf = self.close_sent = True
        self._say_farewell()

    def _say_farewell(self) -> None:
        """Hears the client out, behind a close frame from this side."""
        self._drop_soon(DRAIN_CLOSE_TIMEOUT_S if self._is_draining else MAX_S)
        self._farewell = Farewell(self.transport, self.loop, half_closes=self._is_deaf)
        # Whether or not the application has taken the last message: nothing more comes to it.
        self.read_paused = False
        self.transport.resume_reading()

    def _drop_soon(self, seconds: float) -> None:
        """Lets nobody send any more; the connection goes when the client agrees, or when time is up."""
        self.disconnected = True
        # For those that wait for room.
        self.writable.set()
        self._stop_stuck_timer()
        self.stop_keepalive()
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_stuck_timer(self) -> None:
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
            self._stuck_timer = None
