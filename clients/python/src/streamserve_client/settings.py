"""Where the server is, the key, and times."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long to wait, in seconds; None is for ever. There is no limit to an answer as a whole.

    Attributes:
        connect_s: until there is a connection.
        answer_s: until an answer begins. An answer in one piece begins when it is complete, and one that is
            streamed when its turn in the server's queue has come and its prompt is read, or when the server
            says that this is not so yet, which it does after 15 seconds.
        idle_s: of silence in a stream that has begun. The server fills silence with comments (or with pings
            on a WebSocket), every 15 to 20 seconds unless it is told otherwise, so this long without anything
            means that it cannot be reached any more.
    """

    connect_s: float | None = 10.0
    answer_s: float | None = None
    idle_s: float | None = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the server is, and how to deal with it.

    Attributes:
        url: of the server, with or without `/v1` behind it.
        api_key: None where the server wants none.

    Raises:
        ValueError: `url` is no address of a web server, or `api_key` cannot be sent.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must begin with http:// or https:// and name a host, not {self.url!r}.")
        if parts.query or parts.fragment:
            raise ValueError("url must end with its path: requests append theirs.")
        if not _has_port(parts):
            raise ValueError("url: the port must be a number from 0 to 65535.")
        # Whoever sends it would show it in the error.
        if self.api_key is not None and not re.fullmatch(r"[!-~]+( +[!-~]+)*", self.api_key):
            raise ValueError(
                "api_key: it must be printable ASCII, not empty, and without spaces or line ends around it."
            )

    @property
    def base_url(self) -> str:
        """The URL that paths are appended to."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def socket_url(self) -> str:
        """Of the WebSocket for many streams."""
        return "ws" + self.base_url[len("http") :] + "/v1/ws"

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


def _has_port(parts: SplitResult) -> bool:
    """Whether there is none, or one that is possible."""
    try:
        return parts.port is None or parts.port >= 0
    except ValueError:
        return False
