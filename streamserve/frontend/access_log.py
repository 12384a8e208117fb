"""A line in the log for each exchange with a client: who, what, how long. Never what was said."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

MAX_PATH_CHARS = 200

logger = logging.getLogger("streamserve.access")


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished exchange.

    Attributes:
        client: its address.
        method: of HTTP, or WS.
        path: without the query, which may hold a key.
        status: of HTTP; 101 for a WebSocket that was accepted, 499 if the client left before an answer.
        duration_s: from the head of the request to the end of the answer.
        key: name of the API key, "" without one.
        request_id: the X-Request-Id of the answer.
    """

    client: str
    method: str
    path: str
    status: int
    duration_s: float
    key: str
    request_id: str


def write(entry: Entry) -> None:
    """Logs `entry`; as JSON, its fields are members of the line."""
    path = entry.path[:MAX_PATH_CHARS].encode("unicode_escape").decode()
    logger.info(
        '%s "%s %s" %d %.3f s key=%s id=%s',
        entry.client,
        entry.method,
        path,
        entry.status,
        entry.duration_s,
        entry.key or "-",
        entry.request_id,
        extra={"fields": asdict(entry)},
    )
