"""Where the server is, the key, and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long to wait, in seconds; None is for ever. There is no limit to an answer as a whole.

    Attributes:
        connect_s: until there is a connection.
        answer_s: until an answer begins. An answer in one piece begins when it is complete, and one that is
            streamed when its turn in the server's queue has come and its prompt is read.
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
        ValueError: `url` is no address of a web server.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must begin with http:// or https:// and name a host, not {self.url!r}.")

    @property
    def base_url(self) -> str:
        """The URL that paths are appended to."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def socket_url(self) -> str:
        """Of the WebSocket for many streams."""
        return self.base_url.replace("http", "ws", 1) + "/v1/ws"

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
