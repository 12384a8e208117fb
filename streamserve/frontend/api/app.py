"""The routes, put together, and what every exchange passes before it comes to one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp

from streamserve.config import ServerConfig
from streamserve.frontend import paths
from streamserve.frontend.api import problems
from streamserve.frontend.api.chat import ChatEndpoint
from streamserve.frontend.api.completions import CompletionEndpoint
from streamserve.frontend.api.control import Control
from streamserve.frontend.api.dashboard import Dashboard
from streamserve.frontend.api.docs import Documents
from streamserve.frontend.api.endpoint import Endpoint
from streamserve.frontend.api.http import HttpTransport
from streamserve.frontend.api.models import Models
from streamserve.frontend.api.responses import ResponsesEndpoint
from streamserve.frontend.api.resume import STREAM_HEADER, Resumption
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.streams import Streams
from streamserve.frontend.api.tokenization import Tokenization
from streamserve.frontend.api.websocket import StreamSocket
from streamserve.frontend.api.websocket_responses import ResponsesSocket
from streamserve.frontend.auth import Authentication
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.hosts import Hosts
from streamserve.frontend.middleware import REQUEST_ID, Edge
from streamserve.frontend.monitor import Monitor
from streamserve.frontend.pages import Pages
from streamserve.frontend.resume.neighbours import Neighbours

PREFLIGHT_MAX_AGE_S = 86400


def build_app(service: Service, deployment: Deployment | None = None) -> ASGIApp:
    """The ASGI application; it listens to the engine from its lifespan's start to its end.

    From outside to inside: ids, log and metrics; CORS, whose preflight requests bring no key; keys; routes.
    """
    around = deployment or Deployment()
    monitor = Monitor(service.client, service.registry.metrics, service.kept)
    neighbours = _neighbours(service, around)
    resumption = Resumption(service, neighbours)
    streams = Streams(service, around, resumption)
    service.client.answer_relays(partial(_answer, streams, neighbours))
    control = Control(service, around, monitor)
    documents, pages = Documents(around.server.root_path), Pages(around.server)
    routes = [
        *_generation(service, resumption),
        *_information(service, streams),
        *_operations(control),
        *Dashboard(service, around, monitor).routes,
        Route("/openapi.json", documents.openapi, methods=["GET"]),
        Route("/docs", documents.docs, methods=["GET"]),
        *pages.routes,
    ]
    lifespan = _lifespan(service, around, monitor, neighbours)
    app: ASGIApp = Starlette(routes=routes, exception_handlers=problems.HANDLERS, lifespan=lifespan)
    app = Authentication(
        app,
        around.keys,
        metrics_open=around.auth.metrics_open,
        ws_query_key=around.auth.ws_query_key,
        allowed_origins=around.server.allowed_origins,
        hosts=Hosts.of(around.server, needs_key=around.keys.needs_key),
        open_paths=pages.paths,
    )
    if around.server.allowed_origins:
        app = _with_cors(app, around.server)
    return Edge(
        app,
        routes,
        service.registry.metrics,
        service.draining,
        logs_access=around.server.access_log,
        tracer=around.tracer,
    )


def _lifespan(
    service: Service, around: Deployment, monitor: Monitor, neighbours: Neighbours | None
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """What starts and stops with the application."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        service.client.start()
        monitor.start()
        if neighbours is not None:
            neighbours.start()
        try:
            yield
        finally:
            monitor.stop()
            if neighbours is not None:
                await neighbours.stop()
            await service.kept.close()
            service.client.stop()
            if around.tracer is not None:
                around.tracer.close()

    return lifespan


def _answer(streams: Streams, neighbours: Neighbours | None, question: dict[str, Any]) -> Any | None:
    """What another frontend wants to know of this one; None if there is nothing to say."""
    known = streams.answer(question)
    return neighbours.answer(question) if known is None and neighbours is not None else known


def _neighbours(service: Service, around: Deployment) -> Neighbours | None:
    if around.doors is None:
        return None
    return Neighbours(service.kept, service.client, around.doors, around.index)


def _generation(service: Service, resumption: Resumption) -> list[BaseRoute]:
    chat, completions = ChatEndpoint(service), CompletionEndpoint(service)
    responses = ResponsesEndpoint(service)
    endpoints: dict[str, Endpoint] = {
        "chat.completions": chat,
        "completions": completions,
        "responses": responses,
    }
    return [
        Route("/v1/chat/completions", HttpTransport(service, chat, resumption).handle, methods=["POST"]),
        Route("/v1/completions", HttpTransport(service, completions, resumption).handle, methods=["POST"]),
        Route("/v1/responses", HttpTransport(service, responses, resumption).handle, methods=["POST"]),
        WebSocketRoute("/v1/responses", ResponsesSocket(service, responses)),
        WebSocketRoute("/v1/ws", StreamSocket(service, endpoints, resumption)),
    ]


def _information(service: Service, streams: Streams) -> list[BaseRoute]:
    models, tokenization = Models(service), Tokenization(service)
    return [
        Route("/tokenize", tokenization.tokenize, methods=["POST"]),
        Route("/detokenize", tokenization.detokenize, methods=["POST"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{model:path}", models.show, methods=["GET"]),
        Route("/v1/streams", streams.show_all, methods=["GET"]),
        Route("/v1/streams/{id}", streams.one, methods=["GET", "DELETE"]),
    ]


def _operations(control: Control) -> list[BaseRoute]:
    return [
        Route(paths.LIVE, control.live, methods=["GET"]),
        Route(paths.READY, control.ready, methods=["GET"]),
        Route(paths.HEALTH, control.health, methods=["GET"]),
        Route(paths.PING, control.ping, methods=["GET", "POST"]),
        Route(paths.METRICS, control.metrics, methods=["GET"]),
        Route("/load", control.load, methods=["GET"]),
        Route("/version", control.version, methods=["GET"]),
        Route(paths.RESET_PREFIX_CACHE, control.reset_prefix_cache, methods=["POST"]),
    ]


def _with_cors(app: ASGIApp, server: ServerConfig) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=server.allowed_origins,
        allow_methods=server.allowed_methods,
        allow_headers=server.allowed_headers,
        allow_credentials=server.allow_credentials,
        # What a browser's script may read besides the body.
        expose_headers=(REQUEST_ID.decode(), STREAM_HEADER, "retry-after"),
        max_age=PREFLIGHT_MAX_AGE_S,
    )
