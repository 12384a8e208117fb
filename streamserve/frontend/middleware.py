"""What every exchange passes first and last: its id, its line in the log, and what is counted of it."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Iterable

from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamserve.frontend import access_log, paths, request_ids
from streamserve.frontend.api.endpoint import tenant_of
from streamserve.frontend.auth import route_path
from streamserve.frontend.families import METHODS
from streamserve.frontend.metrics import Metrics
from streamserve.frontend.tracing import Tracer

REQUEST_ID = b"x-request-id"
CONTENT_LENGTH = b"content-length"
_VALID_ID = re.compile(request_ids.PATTERN.encode())
# The client left before there was an answer. No client ever sees this status.
LEFT = 499
# The template of what is no route.
NO_ROUTE = "none"
_UNCOUNTED = paths.PROBES | paths.MONITORING
_UNLOGGED = paths.PROBES | {paths.METRICS}


def valid_request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The id that a caller gave its request if it is fit for headers and logs, else a random one."""
    for name, value in headers:
        if name == REQUEST_ID and _VALID_ID.fullmatch(value):
            return value
    return secrets.token_hex(16).encode()


class Exchange:
    """One request and its answer, while they last.

    Attributes:
        status: of the answer; 0 until it begins.
        num_received: bytes of the request's body so far.
        content_length: what the answer's head says of its body; 0 if it says nothing, as that of a stream.
    """

    __slots__ = ("_closing", "_receive", "_request_id", "_send", "content_length", "num_received", "status")

    def __init__(self, request_id: bytes, receive: Receive, send: Send, closing: asyncio.Event) -> None:
        self.status = 0
        self.num_received = 0
        self.content_length = 0
        self._request_id = request_id
        self._receive = receive
        self._send = send
        self._closing = closing

    async def receive(self) -> Message:
        """Passes a message on. What a head says of the body is not believed: the bytes are counted."""
        message = await self._receive()
        self.num_received += len(message.get("body", b""))
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Passes a message on. Hot: once a chunk, hence no coroutine of its own."""
        if not self.status:
            self._begin(message)
        return self._send(message)

    def _begin(self, message: Message) -> None:
        kind = message["type"]
        if kind == "websocket.accept":
            self.status = 101
        elif kind == "websocket.close":
            self.status = 403
        else:
            self.status = message["status"]
        if kind == "websocket.close":
            return
        given = [(name.lower(), value) for name, value in message.get("headers", ())]
        headers = [pair for pair in given if pair[0] != REQUEST_ID]
        self.content_length = next((int(value) for name, value in headers if name == CONTENT_LENGTH), 0)
        headers.append((REQUEST_ID, self._request_id))
        if kind == "http.response.start" and self._closing.is_set():
            headers.append((b"connection", b"close"))
        message["headers"] = headers


class Edge:
    """The outermost ASGI middleware.

    The id of a request is put where the caller would have put it, so that everything behind reads one header.

    Args:
        app: the application.
        routes: its routes; their templates are the handlers in metrics.
        metrics: what is counted goes here.
        draining: once set, answers ask clients to close the connection.
        logs_access: whether each exchange is logged.
        tracer: makes a span for each exchange, if anybody collects them.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Iterable[BaseRoute],
        metrics: Metrics,
        draining: asyncio.Event,
        *,
        logs_access: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._templates = {
            route.endpoint: route.path for route in routes if isinstance(route, Route | WebSocketRoute)
        }
        self._metrics = metrics
        self._draining = draining
        self._logs_access = logs_access
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        request_id = valid_request_id(scope["headers"])
        headers = [pair for pair in scope["headers"] if pair[0] != REQUEST_ID]
        scope["headers"] = [*headers, (REQUEST_ID, request_id)]
        exchange = Exchange(request_id, receive, send, self._draining)
        span = None if self._tracer is None else self._tracer.begin(scope)
        if scope["type"] == "websocket":
            self._metrics.sockets.active.add()
            self._metrics.sockets.opened.add()
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            status, duration_s = exchange.status or LEFT, time.monotonic() - started_s
            template = self._templates.get(scope["endpoint"], NO_ROUTE) if "endpoint" in scope else NO_ROUTE
            self._count(scope, template, status, duration_s, exchange)
            if self._logs_access:
                self._log(scope, status, duration_s, request_id)
            if self._tracer is not None:
                about = {"streamserve.request_id": request_id.decode(), "streamserve.key": tenant_of(scope)}
                self._tracer.end(span, scope, template, status, about)

    def _count(self, scope: Scope, template: str, status: int, duration_s: float, exchange: Exchange) -> None:
        if scope["type"] == "websocket":
            self._metrics.sockets.active.add(-1)
            self._metrics.sockets.duration.observe(duration_s)
            return
        if template in _UNCOUNTED:
            return
        method = scope["method"] if scope["method"] in METHODS else "other"
        row = self._metrics.row
        row.counter("http_requests", template, method, f"{status // 100}xx").add()
        row.histogram("http_request_duration_seconds", template, method).observe(duration_s)
        row.histogram("http_request_duration_highr_seconds").observe(duration_s)
        row.histogram("http_request_size_bytes", template).observe(exchange.num_received)
        row.histogram("http_response_size_bytes", template).observe(exchange.content_length)

    def _log(self, scope: Scope, status: int, duration_s: float, request_id: bytes) -> None:
        path = route_path(scope)
        if path in _UNLOGGED and status < 400:
            return
        client = scope.get("client")
        access_log.write(
            access_log.Entry(
                client=client[0] if client else "-",
                method=scope.get("method", "WS"),
                path=path,
                status=status,
                duration_s=round(duration_s, 6),
                key=tenant_of(scope),
                request_id=request_id.decode(),
            )
        )
