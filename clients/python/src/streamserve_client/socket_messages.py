"""The messages of the server's WebSocket /v1/ws: which is for which stream. Knows no socket.

client                                               server
{"type":"create","id":I,"endpoint":E,"body":{…}}     {"id":I,"type":"chunk","chunk":{…}} …, or
{"type":"resume","id":I,"stream":S,"after":N}        {"id":I,"type":"result","result":{…}}, then
{"type":"cancel","id":I}                             {"id":I,"type":"done"}, or in place of any of them
                                                     {"id":I,"type":"error","error":{…}}

A stream that the server keeps is announced by {"id":I,"type":"accepted","stream":S}, and its messages have a
number, "n":N. An error without one is none of the stream.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from typing import Any, Protocol

from websockets.exceptions import ConnectionClosed, InvalidStatus

from streamserve_client.endpoints import Call
from streamserve_client.errors import (
    APIError,
    BadRequest,
    ClientError,
    ConnectionFailed,
    InvalidAnswer,
    api_error,
)
from streamserve_client.http_messages import parse_object, status_error
from streamserve_client.place import Place

# A chunk or a result; None for the end of the stream; or why there is no more.
Item = dict[str, Any] | None | ClientError
PING = '{"type":"ping"}'
TOO_LARGE = 1009


class Inbox(Protocol):
    """Where the messages of one stream wait for it."""

    def put_nowait(self, item: Item, /) -> None: ...


class Multiplexer:
    """The streams of one connection.

    Errors that name no stream (a message that is too large or nested too deeply to be looked at) belong to
    the `create` that the server is just looking at. Messages are looked at in order and a ping is answered at
    once, so with a ping behind each `create` it is the one after the last pong.

    Attributes:
        is_lost: the connection is over.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self._ids = itertools.count(1)
        self._inboxes: dict[int | None, Inbox] = {}
        self._places: dict[int | None, Place] = {}
        self._unconfirmed: deque[int] = deque()

    def open(self, call: Call, place: Place, inbox: Inbox) -> tuple[int, str]:
        """A new stream of this connection: its id, and the message that begins it or comes back to it, behind
        which a PING must be sent."""
        stream_id = next(self._ids)
        message = _return_of(place) if place.has_come_back else _creation_of(call, place)
        encoded = json.dumps({**message, "id": stream_id}, ensure_ascii=False, allow_nan=False)
        # What cannot be sent raises here, before anything counts on it.
        encoded.encode()
        place.sent()
        self._places[stream_id] = place
        self._inboxes[stream_id] = inbox
        self._unconfirmed.append(stream_id)
        # In this order: another thread may just be losing the connection, and one of the two sees the other.
        if self.is_lost:
            self._give(stream_id, ConnectionFailed("the connection is over"), is_last=True)
        return stream_id, encoded

    def take(self, text: str | bytes) -> None:
        """Gives a message to the stream that it is for; those who have left get none. Hot: once a chunk.

        Raises:
            InvalidAnswer: it is no message.
        """
        message = parse_object(text if isinstance(text, str) else "")
        kind, stream_id = message.get("type"), message.get("id")
        if not isinstance(stream_id, int | None):
            # Nothing has such an id.
            return
        if kind == "pong":
            if self._unconfirmed:
                self._unconfirmed.popleft()
        elif kind in ("chunk", "result"):
            item = message.get(kind)
            if not isinstance(item, dict):
                raise InvalidAnswer(f"the server sent a message without an object: {text[:200]!r}")
            self._pass(stream_id, message, item)
        elif kind == "done":
            self._pass(stream_id, message, None, is_last=True)
        elif kind == "accepted":
            self._attach(stream_id, message.get("stream"))
        elif kind == "error":
            if stream_id is None and self._unconfirmed:
                stream_id = self._unconfirmed[0]
            self._pass(stream_id, message, _error_of(message.get("error")), is_last=True)

    def leave(self, stream_id: int | None) -> str | None:
        """Nobody wants the rest of a stream: the message that says so, unless it is over."""
        place = self._places.pop(stream_id, None)
        if self._inboxes.pop(stream_id, None) is None or self.is_lost:
            return None
        if place is not None:
            place.forget()
        return json.dumps({"type": "cancel", "id": stream_id})

    def leave_all(self, reason: str) -> list[str]:
        """Nobody wants the rest of any stream: the messages that say so. Who waits for one hears why."""
        stream_ids = list(self._inboxes)
        inboxes = [self._inboxes.get(stream_id) for stream_id in stream_ids]
        cancels = [self.leave(stream_id) for stream_id in stream_ids]
        self.is_lost = True
        for inbox in inboxes:
            if inbox is not None:
                inbox.put_nowait(ConnectionFailed(reason))
        return [cancel for cancel in cancels if cancel is not None]

    def lose(self, reason: str, close_code: int | None = None) -> None:
        """The connection is over, and all its streams with it."""
        self.is_lost = True
        if close_code == TOO_LARGE and self._unconfirmed:
            error = BadRequest("The request is too large.", status=413, code="body_too_large")
            self._give(self._unconfirmed[0], error, is_last=True)
        for stream_id in list(self._inboxes):
            self._give(stream_id, ConnectionFailed(reason), is_last=True)

    def _attach(self, stream_id: Any, name: Any) -> None:
        place = self._places.get(stream_id)
        if place is not None and isinstance(name, str):
            place.attach(name)

    def _pass(
        self, stream_id: int | None, message: dict[str, Any], item: Item, *, is_last: bool = False
    ) -> None:
        """Gives what its stream has not had yet. Hot: once a chunk."""
        place = self._places.get(stream_id)
        if place is None:
            return
        number = message.get("n")
        try:
            if isinstance(number, int):
                if not place.is_attached:
                    # Whoever comes back is not told the name again.
                    place.attach(place.name)
                if not place.takes_number(number):
                    return
            elif isinstance(item, ClientError):
                place.left_alone()
            else:
                # A stream that is not kept.
                place.attach(None)
        except ConnectionFailed as error:
            item, is_last = error, True
        self._give(stream_id, item, is_last=is_last)

    def _give(self, stream_id: int | None, item: Item, *, is_last: bool = False) -> None:
        inbox = self._inboxes.pop(stream_id, None) if is_last else self._inboxes.get(stream_id)
        if inbox is not None:
            inbox.put_nowait(item)


def _creation_of(call: Call, place: Place) -> dict[str, Any]:
    body = call.body
    if place.is_kept:
        options = {**(body.get("stream_options") or {}), "resumable": True}
        body = {**body, "request_id": place.request_id, "stream_options": options}
    return {"type": "create", "endpoint": call.endpoint, "body": body}


def _return_of(place: Place) -> dict[str, Any]:
    return {"type": "resume", "stream": place.name, "after": place.num_events}


def _error_of(error: Any) -> APIError:
    fields = error if isinstance(error, dict) else {}
    status, retry_after_s = fields.get("status"), fields.get("retry_after")
    return api_error(
        error,
        status=status if isinstance(status, int) else None,
        retry_after_s=retry_after_s if isinstance(retry_after_s, int | float) else None,
    )


def opening_failure(error: Exception) -> ClientError:
    """Why there is no connection: what the server answered, or what came instead of an answer."""
    if isinstance(error, InvalidStatus):
        response = error.response
        body = (response.body or b"").decode(errors="replace")
        headers = response.headers
        return status_error(
            response.status_code, body, headers.get("Retry-After"), headers.get("X-Request-Id")
        )
    return ConnectionFailed(f"no WebSocket connection: {error or type(error).__name__}")


def closing_reason(error: ConnectionClosed) -> tuple[str, int | None]:
    """Why a connection is over, for a person, and the server's close code."""
    close = error.rcvd
    if close is None:
        return "the connection broke", None
    return f"the server closed the connection ({close.code} {close.reason})".replace(" )", ")"), close.code
