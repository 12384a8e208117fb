"""Where a stream is, over all its connections, so that it can be gone on with after one of them is lost.

The server keeps a stream that is asked for as resumable for a while without a connection, numbers its events,
and gives those after any number to whoever comes back. It names the stream at its first sign of life. Until
then the name is known all the same, for the client chooses the id of the request.
"""

from __future__ import annotations

import uuid
from urllib.parse import quote

from streamserve_client.endpoints import Call
from streamserve_client.errors import RETRYABLE_STATUSES, APIError, ClientError, ConnectionFailed, NotFound

STREAM_EXISTS = "stream_exists"
# Between asking for the stream and making the request, without a wait.
MAX_TURNS = 4


class Place:
    """One stream.

    Args:
        call: what begins it.
        is_kept: it is to outlive its connections, if the server can do that.

    Attributes:
        is_kept: see above.
        request_id: of the request, however often it is made.
        name: of the stream.
        may_exist: the request was sent, and nothing says that there is no such stream.
        is_attached: this connection has given something of the stream: errors are its own from here on.
        num_events: how many have come.
    """

    __slots__ = (
        "_has_come_back",
        "_is_named",
        "_num_requests",
        "_num_turns",
        "is_attached",
        "is_kept",
        "may_exist",
        "name",
        "num_events",
        "request_id",
    )

    def __init__(self, call: Call, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self.request_id = str(call.body.get("request_id") or uuid.uuid4().hex)
        self.name = call.id_prefix + self.request_id
        self.may_exist = False
        self.is_attached = False
        self.num_events = 0
        self._is_named = False
        self._has_come_back = False
        self._num_requests = 0
        self._num_turns = 0

    @property
    def path(self) -> str:
        """Over HTTP."""
        return f"/v1/streams/{quote(self.name, safe='')}"

    @property
    def event_id(self) -> str:
        """Of the last event that has come."""
        return f"{self.name}:{self.num_events}"

    def connect(self) -> bool:
        """A connection begins: whether to come back to the stream on it, or to make the request."""
        self._has_come_back = self.may_exist
        if not self.may_exist:
            self.may_exist = self.is_kept
            self._num_requests += 1
        return self._has_come_back

    def unsent(self) -> None:
        """There was no connection."""
        if not self._has_come_back:
            self.may_exist = False

    def attach(self, name: str | None) -> None:
        """The server gives the stream on this connection.

        Args:
            name: as the server says; None if it does not keep it.
        """
        self.is_attached = True
        if name is None:
            self.forget()
        else:
            self.name, self._is_named = name, True

    def passed(self, event_id: str) -> None:
        """An event with this id has come. Hot: once a chunk."""
        number = event_id.rpartition(":")[2]
        if number.isdecimal():
            self.num_events = int(number)

    def left_alone(self) -> None:
        """The server says that it does not give more of a stream that it keeps on this connection."""
        if self._is_named:
            self.is_attached = False

    def forget(self) -> None:
        """There is nothing to come back to, or to end."""
        self.may_exist = self._is_named = False

    def takes_turn(self, error: ClientError) -> bool:
        """Whether `error` says to do the other thing at once: to make the request because it has never
        arrived, or to come back to the stream because it did."""
        if self.is_attached or not isinstance(error, APIError):
            return False
        if self._has_come_back:
            if not isinstance(error, NotFound) or self.num_events:
                return False
            self.forget()
        else:
            self.may_exist = error.code == STREAM_EXISTS and self._num_requests > 1
            if not self.may_exist:
                return False
        self._num_turns += 1
        return self._num_turns <= MAX_TURNS

    def can_return(self, error: ClientError) -> bool:
        """Whether a stream of which something has come may still be there after `error`."""
        if not self._is_named:
            return False
        is_busy = isinstance(error, APIError) and error.status in RETRYABLE_STATUSES
        return isinstance(error, ConnectionFailed) or (is_busy and not self.is_attached)
