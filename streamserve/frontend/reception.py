"""Who answers before the application is there: while a model is downloaded, converted, its tokenizer read.

Probes hear how far that is, web pages are served as always (they ask the probes), and all others are answered
a 503 that says when to come back. Every answer closes its connection, so that the next request is the
application's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from streamserve.config import Config
from streamserve.errors import EngineUnavailable
from streamserve.frontend import paths
from streamserve.frontend.api import problems
from streamserve.frontend.auth import refuse
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.metrics import Metrics
from streamserve.frontend.middleware import Edge
from streamserve.frontend.pages import Pages
from streamserve.frontend.server import http_settings
from streamserve.frontend.status import Progress, while_loading

_REFUSAL = problems.problem_of(EngineUnavailable("The model is not here yet; try again soon."))
_ANYTHING = "/{path:path}"


class _Refusal:
    """The ASGI application for all that takes a model, and for all that may take a key."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await refuse(_REFUSAL, scope, receive, send)


class _Probes:
    """The endpoints that need no model.

    Args:
        progress: how far the model is.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    async def live(self, _http: Request) -> Response:
        """200: this process turns its event loop."""
        return _json({"status": "ok"}, 200)

    async def unready(self, _http: Request) -> Response:
        """503, with how far the start is."""
        return _json(while_loading("loading", self._progress), 503)


def _json(body: dict[str, object], status: int) -> Response:
    return Response(orjson.dumps(body), status, {"Cache-Control": "no-store"}, "application/json")


def build_reception(deployment: Deployment, metrics: Metrics) -> ASGIApp:
    """The ASGI application that stands in; what it answers is logged and counted like all else."""
    probes, refusal = _Probes(deployment.progress), _Refusal()
    answered = [
        Route(paths.LIVE, probes.live),
        Route(paths.READY, probes.unready),
        Route(paths.HEALTH, probes.unready),
        Route(paths.PING, probes.unready, methods=["GET", "POST"]),
        *Pages(deployment.server).routes,
    ]
    rest: Sequence[BaseRoute] = [Route(_ANYTHING, refusal), WebSocketRoute(_ANYTHING, refusal)]
    app = Starlette(routes=[*answered, *rest], exception_handlers=problems.HANDLERS)
    is_closing = asyncio.Event()
    is_closing.set()
    return Edge(app, answered, metrics, is_closing, logs_access=deployment.server.access_log)


class Reception:
    """Listens with the stand-in, beside the server that takes over or before it.

    Args:
        app: what answers.
        config: how it listens.

    Raises:
        ConfigError: a file for HTTPS cannot be used.
    """

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._settings = http_settings(app, config, lifespan="off")
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def open(self, listen: socket.socket) -> None:
        """Begins to accept connections; `listen` stays open at the end."""
        settings = self._settings
        # uvicorn calls it with these arguments, whatever its own type says.
        make: Any = settings.http_protocol_class
        protocol = partial(make, settings, self._state, {})
        self._server = await asyncio.get_running_loop().create_server(
            protocol, sock=listen.dup(), ssl=settings.ssl, backlog=settings.backlog
        )

    def close(self) -> None:
        """Accepts no more, drops idle connections, and lets answers that are being written finish."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
