"""The routes, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Route

from streamserve.frontend.api import problems
from streamserve.frontend.api.chat import ChatCompletions
from streamserve.frontend.api.completions import Completions
from streamserve.frontend.api.control import Control
from streamserve.frontend.api.models import Models
from streamserve.frontend.api.service import Service


def build_app(service: Service) -> Starlette:
    """The ASGI application; it listens to the engine from its lifespan's start to its end."""
    chat, completions = ChatCompletions(service), Completions(service)
    models, control = Models(service), Control(service)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        service.client.start()
        try:
            yield
        finally:
            service.client.stop()

    routes = [
        Route("/v1/chat/completions", chat.handle, methods=["POST"]),
        Route("/v1/completions", completions.handle, methods=["POST"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{model:path}", models.show, methods=["GET"]),
        Route("/health", control.health, methods=["GET"]),
        Route("/load", control.load, methods=["GET"]),
        Route("/version", control.version, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers=problems.HANDLERS, lifespan=lifespan)
