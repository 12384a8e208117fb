"""Under which names a server may be called by those who bring no key.

A page of any site can make its own name stand for this machine: the site's name server says so once the page
is loaded (DNS rebinding). To the browser the server is then that page's own, so neither CORS nor an Origin
tells it from the server's pages. The Host header does: it has the site's name in it. Addresses and
`localhost` cannot be had by others, as no name server is asked for them.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from streamserve.config import ServerConfig
from streamserve.frontend.api.problems import Problem
from streamserve.frontend.origins import ANY

_LOCAL = "localhost"
_SHOWN_CHARS = 200


class Hosts:
    """The names.

    Args:
        allowed: besides addresses and `localhost`; `*` is every name.
    """

    def __init__(self, allowed: Collection[str] = (ANY,)) -> None:
        self._is_any = ANY in allowed
        self._allowed = frozenset(map(_plain, allowed))

    @classmethod
    def of(cls, server: ServerConfig, *, needs_key: bool) -> Hosts:
        """As configured; unless the operator names any, all where somebody other than this machine may call.

        With a key there is nothing to be had by a page; and where every page may call the server, its name
        does not matter.
        """
        if server.allowed_hosts:
            return cls(server.allowed_hosts)
        is_private = is_loopback(server.host) and not needs_key and ANY not in server.allowed_origins
        return cls(() if is_private else (ANY,))

    def refusal(self, scope: Scope) -> Problem | None:
        """What to tell who calls the server by another name; None if it is a right one, or none at all."""
        if self._is_any:
            return None
        # Browsers always send one.
        host = Headers(scope=scope).get("host")
        if host is None or self._is_allowed(_name(host)):
            return None
        return Problem(
            403,
            "permission_error",
            "host_not_allowed",
            f"This server is not to be called {host[:_SHOWN_CHARS]!r}; its operator can allow that name with "
            "--allowed-hosts.",
        )

    def _is_allowed(self, name: str | None) -> bool:
        return name is not None and (name in self._allowed or is_local_name(name) or _is_address(name))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return is_local_name(_plain(host))


def is_local_name(name: str) -> bool:
    """Whether a name in small letters is this machine's for everybody (RFC 6761)."""
    return name == _LOCAL or name.endswith("." + _LOCAL)


def _name(host: str) -> str | None:
    """The name in a Host header, without its port; None if that is none."""
    try:
        return _plain(urlsplit(f"//{host}").hostname or "") or None
    except ValueError:
        return None


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
