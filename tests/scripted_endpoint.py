"""A generation endpoint that a test steers, and a server with nothing but WebSockets in front of it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

from streamserve.errors import BodyTooLarge, InvalidRequest
from streamserve.frontend.api.body import BodyLimit
from streamserve.frontend.api.endpoint import Call
from streamserve.frontend.api.structure import MAX_VALUES
from streamserve.frontend.registry import Registry
from streamserve.frontend.resume.store import StreamStore
from streamserve.frontend.websocket_protocol import StreamSocketProtocol

WAIT_S = 60.0
END = object()


class ScriptedGeneration:
    """What a registry knows of a generation."""

    prompt = (1, 2, 3)
    params = SimpleNamespace(max_tokens=1)
    cached_tokens = 0
    began_s = None

    def __init__(self, answer: ScriptedAnswer) -> None:
        self._answer = answer

    def cancel(self) -> None:
        self._answer.cancel()


class ScriptedAnswer:
    """Gives what the test puts into it: batches, one object, an exception, or the end."""

    def __init__(self, endpoint: ScriptedEndpoint, call: Call) -> None:
        self.id = f"cmpl-{call.body.get('request_id', call.request_id)}"
        self.is_stream = bool(call.body.get("stream"))
        self.asks_resume = bool((call.body.get("stream_options") or {}).get("resumable"))
        self.call = call
        self.is_closed = asyncio.Event()
        self._endpoint = endpoint
        self._items: asyncio.Queue[Any] = asyncio.Queue()

    def give(self, item: Any) -> None:
        self._items.put_nowait(item)

    def cancel(self) -> None:
        self.give({"finish_reason": "abort"})
        self.give(END)

    def _track(self) -> Any:
        return self._endpoint.registry.track(self.id, self.call.tenant, [ScriptedGeneration(self)])

    async def whole(self) -> bytes:
        try:
            with self._track():
                item = await self._items.get()
                if isinstance(item, Exception):
                    raise item
                return json.dumps(item).encode()
        finally:
            self.is_closed.set()

    async def batches(self) -> AsyncGenerator[list[bytes], None]:
        try:
            with self._track():
                while True:
                    item = await self._items.get()
                    if item is END:
                        return
                    if isinstance(item, Exception):
                        raise item
                    batch = item if isinstance(item, list) else [item]
                    yield [json.dumps(chunk, ensure_ascii=False).encode() for chunk in batch]
        finally:
            self.is_closed.set()


@dataclass
class ScriptedEndpoint:
    """Accepts everything but a body with `bad`; waits for `gate` before it does."""

    names_events = False

    registry: Registry
    answers: list[ScriptedAnswer] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    async def accept(self, call: Call) -> ScriptedAnswer:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        if "bad" in call.body:
            raise InvalidRequest("bad is bad.", "bad")
        answer = ScriptedAnswer(self, call)
        self.answers.append(answer)
        self._came.set()
        return answer

    async def answer(self, index: int) -> ScriptedAnswer:
        """The answer to the request that came as number `index`."""
        async with asyncio.timeout(WAIT_S):
            while len(self.answers) <= index:
                self._came.clear()
                await self._came.wait()
        return self.answers[index]


@dataclass
class SocketServer:
    """The server, its endpoint and what they share."""

    url: str
    endpoint: ScriptedEndpoint
    service: Any
    server: uvicorn.Server

    def stop(self) -> None:
        """What a stop signal does."""
        self.service.draining.set()
        self.server.should_exit = True


@asynccontextmanager
async def socket_server(
    make_app: Any,
    *,
    write_timeout_s: float = 30.0,
    ping_interval_s: float = 20.0,
    ping_timeout_s: float = 20.0,
    max_size: int = 1 << 20,
    useful_bytes: int = 1 << 19,
    graceful_s: int = 10,
    path: str = "/",
) -> AsyncIterator[SocketServer]:
    """Serves `make_app(service, endpoint)`, an ASGI application for WebSockets, at `path`."""
    endpoint = ScriptedEndpoint(Registry())
    endpoint.gate.set()
    threads = ThreadPoolExecutor(1)
    service = SimpleNamespace(
        registry=endpoint.registry,
        kept=StreamStore(metrics=endpoint.registry.metrics),
        draining=asyncio.Event(),
        body_limit=lambda: BodyLimit(
            useful_bytes, BodyTooLarge("The request body is too long."), MAX_VALUES, threads
        ),
    )
    app = Starlette(routes=[WebSocketRoute(path, make_app(service, endpoint))])
    settings = uvicorn.Config(
        app,
        ws=partial(StreamSocketProtocol, write_timeout_s=write_timeout_s),
        ws_max_size=max_size,
        ws_ping_interval=ping_interval_s,
        ws_ping_timeout=ping_timeout_s,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=graceful_s,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(settings)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        async with asyncio.timeout(WAIT_S):
            while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
                await asyncio.sleep(0)
        with threads:
            yield SocketServer(f"ws://127.0.0.1:{listener.getsockname()[1]}", endpoint, service, server)
        service.draining.set()
        server.should_exit = True
