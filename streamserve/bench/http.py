"""Requests and answers as values, for clients that bring their own sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from streamserve.errors import ConfigError

# Called with the time and the bytes of a piece of a body.
OnBody = Callable[[float, bytes], None]
MOST_OF_A_REFUSAL = 64 * 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where requests go.

    Attributes:
        host, port: of the server.
        path: of the URL.
        is_secure: over TLS.
    """

    host: str
    port: int
    path: str
    is_secure: bool

    @classmethod
    def of(cls, base_url: str, path: str) -> Address:
        """The address of `path` on the server at `base_url`.

        Raises:
            ConfigError: `base_url` is no http:// or https:// address.
        """
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError:
            raise ConfigError(f"--base-url: {base_url} has no valid port.") from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"--base-url: {base_url} does not begin with http:// or https:// and a host.")
        is_secure = parts.scheme == "https"
        return cls(
            parts.hostname, port or (443 if is_secure else 80), parts.path.rstrip("/") + path, is_secure
        )

    @property
    def netloc(self) -> str:
        """Host and port as in a Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that has ended.

    Attributes:
        status: of HTTP.
        refusal: the body, if the status is not 200; a long one is cut.
    """

    status: int
    refusal: bytes


def request_head(address: Address, headers: Mapping[str, str]) -> str:
    """The head of a POST of JSON that asks for an event stream, without its length and its end."""
    fields = {"Host": address.netloc, "Content-Type": "application/json", "Accept": "text/event-stream"}
    lines = [f"{name}: {value}\r\n" for name, value in {**fields, **headers}.items()]
    return f"POST {address.path} HTTP/1.1\r\n" + "".join(lines)
