"""Where a stream is, over all its connections, so that it can be gone on with after one of them is lost.

The server keeps a stream that is asked for as resumable for a while without a connection, numbers its events,
and gives those after any number to whoever comes back. It names the stream at its first sign of life. Until
then the name is known all the same, for the client chooses the id of the request.
"""

from __future__ import annotations

import uuid
from urllib.parse import quote

from streamserve_client.endpoints import Call
from streamserve_client.errors import (
    RETRYABLE_STATUSES,
    APIError,
    ClientError,
    ConnectionFailed,
    InvalidAnswer,
    NotFound,
)

STREAM_EXISTS = "stream_exists"
STREAM_TAKEN = "stream_taken"
# A proxy that has no answer of the server: the request may have reached it.
GATEWAY_STATUSES = (502, 504)
# How servers that keep no streams answer who looks for one.
_NEVER_HEARD_STATUSES = (400, 404, 405, 501)
# Between asking for the stream and making the request, without a wait.
MAX_TURNS = 4
NOT_FOUND = 404


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
        has_come_back: this try is not for the request, but for what it has begun.
        num_events: how many have come.
    """

    __slots__ = (
        "_is_named",
        "_num_requests",
        "_num_turns",
        "has_come_back",
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
        self.has_come_back = False
        self._is_named = False
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

    def turn(self) -> None:
        """The next try begins: to come back to the stream, or else to make the request."""
        self.is_attached = False
        self.has_come_back = self.may_exist

    def sent(self) -> None:
        """The server is being asked."""
        if not self.has_come_back:
            self.may_exist = self.is_kept
            self._num_requests += 1

    def unsent(self) -> None:
        """There was no connection."""
        if not self.has_come_back:
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

    def refused(self) -> None:
        """The server says that the stream, whose first event it was waiting for, has come to nothing."""
        self.is_attached = False
        self.forget()

    def left_alone(self) -> None:
        """The server says that it does not give more of a stream that it keeps on this connection."""
        if self._is_named:
            self.is_attached = False

    def takes(self, event_id: str) -> bool:
        """Whether an event with this id is the next one, and none that has come already. Hot: once a chunk.

        Raises:
            ConnectionFailed: there is one missing.
        """
        number = event_id.rpartition(":")[2]
        return self.takes_number(int(number)) if number.isdecimal() else True

    def takes_number(self, number: int) -> bool:
        """The same by its number. Hot: once a chunk."""
        if not self._is_named:
            return True
        if number > self.num_events + 1:
            raise ConnectionFailed(f"event {self.num_events + 1} of the stream did not come")
        is_new = number > self.num_events
        if is_new:
            self.num_events = number
        return is_new

    def forget(self) -> None:
        """There is nothing to come back to, or to end."""
        self.may_exist = self._is_named = False

    def takes_turn(self, error: ClientError) -> bool:
        """Whether `error` says to do the other thing at once: to make the request because it has never
        arrived, or to come back to the stream because it did."""
        if self.is_attached:
            return False
        if self.has_come_back:
            if self.num_events or not self._is_unknown(error):
                return False
            self.forget()
        elif isinstance(error, APIError):
            does_exist = error.code == STREAM_EXISTS and self._num_requests > 1
            self.may_exist = does_exist or (self.is_kept and error.status in GATEWAY_STATUSES)
            if not does_exist:
                return False
        else:
            return False
        self._num_turns += 1
        return self._num_turns <= MAX_TURNS

    def is_unreached(self, error: ClientError) -> bool:
        """Whether `error` says only that the stream could not be reached just now."""
        if isinstance(error, ConnectionFailed):
            return True
        if self.is_attached or not isinstance(error, APIError):
            return False
        return error.status in RETRYABLE_STATUSES or (self.has_come_back and error.status in GATEWAY_STATUSES)

    @property
    def is_kept_there(self) -> bool:
        """The server has said that it keeps the stream."""
        return self._is_named

    def can_return(self, error: ClientError) -> bool:
        """Whether a stream of which something has come may still be there after `error`."""
        # Without numbers it would come from the beginning again.
        return self._is_named and self.num_events > 0 and self.is_unreached(error)

    def settle(self, error: ClientError) -> None:
        """There is no other try after `error`. What may go on nevertheless is left for whoever ends it."""
        if isinstance(error, APIError) and not self._may_outlive(error):
            self.forget()

    def _may_outlive(self, error: APIError) -> bool:
        if self.is_attached or error.code == STREAM_TAKEN:
            return False
        return error.status != NOT_FOUND if self.has_come_back else error.status in GATEWAY_STATUSES

    def _is_unknown(self, error: ClientError) -> bool:
        """Whether `error` says that there is no such stream."""
        if self._is_named:
            return isinstance(error, NotFound)
        if isinstance(error, APIError):
            return error.status in _NEVER_HEARD_STATUSES
        return isinstance(error, InvalidAnswer)
