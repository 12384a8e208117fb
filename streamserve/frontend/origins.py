"""Which web pages may use a server on behalf of whoever looks at them.

A browser lets any page open a WebSocket to any server, and post to it what an HTML form could post. Where no
key is asked for, every page that somebody visits could so use a server on their machine or in their network.
So could it take a stream away from whoever reads it, by asking for its events. For all else that has an
effect a browser asks the server first (CORS), and does not show the page the answer where it must not be
read.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from streamserve.frontend import paths
from streamserve.frontend.api.body import is_json
from streamserve.frontend.api.problems import Problem

ANY = "*"
# What a browser says of a request that no other page has made.
_OWN_SITES = ("same-origin", "none")
_PORTS = {"http": 80, "https": 443}
_SHOWN_CHARS = 200


class Origins:
    """The pages that may.

    Args:
        allowed: the origins of others than this server's own; `*` is all.
    """

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self._allowed = frozenset(allowed)

    def refusal(self, scope: Scope) -> Problem | None:
        """What to tell a page that may not; None if it may, or if it is no page that asks."""
        if ANY in self._allowed:
            return None
        headers = Headers(scope=scope)
        if not _needs_no_permission(scope, headers):
            return None
        origin = headers.get("origin")
        if origin is None:
            # A page that does not want to see the answer does not say where it comes from.
            if not _resumes(scope, headers) or headers.get("sec-fetch-site", "none") in _OWN_SITES:
                return None
        elif origin in self._allowed or _is_own(origin, headers):
            return None
        whose = "other origins" if origin is None else repr(origin[:_SHOWN_CHARS])
        return Problem(
            403,
            "permission_error",
            "origin_not_allowed",
            f"Pages of {whose} may not use this server; its operator can allow them with --allowed-origins.",
        )


def _needs_no_permission(scope: Scope, headers: Headers) -> bool:
    """Whether a browser sends it without asking the server first, and it has an effect."""
    if scope["type"] == "websocket":
        return True
    if scope["method"] == "POST":
        return not is_json(headers.get("content-type", ""))
    return _resumes(scope, headers)


def _resumes(scope: Scope, headers: Headers) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "GET"
        and scope["path"].removeprefix(scope.get("root_path", "")).startswith(paths.STREAMS)
        and paths.EVENT_STREAM in headers.get("accept", "").lower()
    )


def _is_own(origin: str, headers: Headers) -> bool:
    """Whether a page comes from where it sends to.

    Schemes are not compared: a proxy that does the TLS makes `http` of `https`.
    """
    # No page can set this header. A proxy may have put another name into Host.
    if headers.get("sec-fetch-site") == "same-origin":
        return True
    scheme = origin.partition("://")[0]
    here, there = (_place(scheme, name) for name in (headers.get("host", ""), origin.partition("://")[2]))
    return here is not None and here == there


def _place(scheme: str, netloc: str) -> tuple[str, int | None] | None:
    """Host and port, or None if that is none."""
    try:
        parts = urlsplit(f"//{netloc}")
        return (parts.hostname, parts.port or _PORTS.get(scheme)) if parts.hostname else None
    except ValueError:
        return None
