"""Why somebody cannot have a kept stream, or cannot begin one."""

from __future__ import annotations

from streamserve.errors import RequestError


class StreamNotFound(RequestError):
    """No live or kept stream of this caller has that id."""

    status = 404
    code = "stream_not_found"


class StreamExists(RequestError):
    """The caller has a kept stream of that id already: the request has come twice."""

    status = 409
    code = "stream_exists"


class StreamTaken(RequestError):
    """A newer connection has taken the stream over."""

    status = 409
    code = "stream_taken"


class EventsGone(RequestError):
    """The events that are asked for are no longer held."""

    status = 410
    code = "events_gone"


def not_found(stream_id: str) -> StreamNotFound:
    """The same words for all that is not the caller's, whatever the reason."""
    return StreamNotFound(f"No live stream of yours has the id {stream_id[:200]!r}.", "id")
