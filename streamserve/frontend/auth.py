"""Who may come in: checked before anything else looks at a request, and denied unless something allows it.

A key comes as `Authorization: Bearer KEY`. A browser cannot set headers on a WebSocket; it offers the
subprotocol `openai-insecure-api-key.KEY` beside the one it wants, as OpenAI's own clients do, or, where the
operator allows it, asks for `?api_key=KEY`. The subprotocol with the key is taken out of the scope, so that
no answer can repeat it.

Who brings no key, to a server that asks for none, must not be the web page of somebody else
(streamserve.frontend.origins), nor call the server by a name that may be somebody else's
(streamserve.frontend.hosts).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from streamserve.frontend import paths
from streamserve.frontend.api.endpoint import TENANT
from streamserve.frontend.api.problems import Problem
from streamserve.frontend.hosts import Hosts
from streamserve.frontend.keys import ANYBODY, Identity, KeyRing
from streamserve.frontend.origins import Origins

IS_ADMIN = "streamserve.is_admin"
KEY_SUBPROTOCOL = "openai-insecure-api-key."

_NO_KEY = Problem(
    401,
    "authentication_error",
    "invalid_api_key",
    "A valid API key is needed, as the header 'Authorization: Bearer KEY'.",
    headers=(("WWW-Authenticate", "Bearer"),),
)
_NOT_ADMIN = Problem(403, "permission_error", "admin_key_required", "This call needs an admin key.")
_NO_ADMIN = Problem(
    403,
    "permission_error",
    "admin_key_required",
    "This call needs an admin key, and the server was started without one (--admin-key).",
)


class Authentication:
    """ASGI middleware that lets nobody through without a key where one is needed.

    What it lets through has the name of the key in its scope (`endpoint.tenant_of`) and whether it is an
    administrator's (`is_admin`).

    Args:
        app: what is protected.
        keys: the keys of the server.
        metrics_open: whether /metrics and the dashboard's numbers are for everybody.
        ws_query_key: whether a WebSocket's key may be in its URL.
        allowed_origins: of the web pages that need no key, where nobody does.
        hosts: by what names those who bring no key may call the server; by default by any.
        open_paths: what is for everybody besides probes: the pages that ask for a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        *,
        metrics_open: bool = False,
        ws_query_key: bool = False,
        allowed_origins: Collection[str] = (),
        hosts: Hosts | None = None,
        open_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._keys = keys
        self._origins = Origins(allowed_origins)
        self._hosts = hosts or Hosts()
        self._open = paths.PROBES.union(open_paths, paths.MONITORING if metrics_open else ())
        self._ws_query_key = ws_query_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        identity = self._identify(scope)
        refusal = self._refusal(scope, identity)
        if refusal is not None:
            await refuse(refusal, scope, receive, send)
            return
        scope[TENANT] = (identity or ANYBODY).name
        scope[IS_ADMIN] = identity is not None and identity.is_admin
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> Identity | None:
        for key in self._offered(scope):
            identity = self._keys.find(key)
            if identity is not None:
                return identity
        return None

    def _offered(self, scope: Scope) -> Iterator[bytes]:
        """The keys that a request brings, as raw bytes: they may be anything."""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() == b"bearer":
                    yield key.strip()
        if scope["type"] != "websocket":
            return
        offered = scope.get("subprotocols", [])
        scope["subprotocols"] = [name for name in offered if not name.startswith(KEY_SUBPROTOCOL)]
        for name in offered:
            if name.startswith(KEY_SUBPROTOCOL):
                yield name.removeprefix(KEY_SUBPROTOCOL).encode("latin-1", "replace")
        if self._ws_query_key:
            query = scope.get("query_string", b"").decode("latin-1")
            for key in parse_qs(query, encoding="latin-1").get("api_key", []):
                yield key.encode("latin-1")

    def _refusal(self, scope: Scope, identity: Identity | None) -> Problem | None:
        path = route_path(scope)
        is_open = scope["type"] == "http" and path in self._open
        if self._keys.needs_key and identity is None and not is_open:
            return _NO_KEY
        if identity is None and (refusal := self._hosts.refusal(scope)) is not None:
            return refusal
        if path not in paths.ADMIN or (identity is not None and identity.is_admin):
            return self._origins.refusal(scope) if identity is None else None
        if not self._keys.has_admin:
            return _NO_ADMIN
        return _NO_KEY if identity is None else _NOT_ADMIN


def is_admin(scope: Scope) -> bool:
    """Whether a request came with an admin key."""
    return bool(scope.get(IS_ADMIN, False))


def route_path(scope: Scope) -> str:
    """The path that routes are matched with: without the prefix that a proxy has taken off."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request, or a WebSocket before it opens, with `problem`."""
    if scope["type"] == "http":
        await problem.response()(scope, receive, send)
        return
    # The first message is the connection itself; it is turned down before it is accepted.
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": problem.message})
        return
    headers = [(b"content-type", b"application/json")]
    headers += [(name.lower().encode(), value.encode()) for name, value in problem.headers]
    await send({"type": "websocket.http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": problem.encode(), "more_body": False})
