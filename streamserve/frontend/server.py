"""uvicorn, as this frontend runs it: its protocols, its limits, and its idea of stopping."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp

from streamserve.bootstrap import STOP_ORDER
from streamserve.config import Config
from streamserve.frontend.api.service import Service
from streamserve.frontend.protocol import HeadLimits, LimitedHttpProtocol
from streamserve.frontend.tls import server_context
from streamserve.frontend.websocket_protocol import StreamSocketProtocol

logger = logging.getLogger(__name__)

STOP_SIGNALS = (STOP_ORDER, signal.SIGTERM, signal.SIGINT)
# After the drain time streams end by themselves with an error event. A connection that is there even then
# waits for a client that does not read, and is cut off before uvicorn would cancel its task.
CUT_OFF_AFTER_S = 1.5
CANCEL_AFTER_S = 3
# A WebSocket message is a request body in an envelope.
ENVELOPE_BYTES = 4096


class FrontendServer(uvicorn.Server):
    """uvicorn with this server's idea of stopping.

    The first signal: new requests are answered 503 from then on, WebSockets are told, idle connections are
    closed. Once no stream is left, or the drain time is over and the rest has ended with an error, nothing is
    accepted any more and the process ends. The same signal again ends it at once.

    Args:
        config: uvicorn's.
        service: its streams are drained.
        drain_timeout_s: how long they may take.
        on_started: called when connections are accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        drain_timeout_s: float,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._service = service
        self._drain_timeout_s = drain_timeout_s
        self._on_started = on_started
        self._received: set[int] = set()
        self._deadline_s = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept, and says so."""
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles the signals to stop while it serves; unlike the base class, does not raise them again."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to stop accepting."""
        if self._service.draining.is_set():
            is_over = asyncio.get_running_loop().time() >= self._deadline_s
            self.should_exit = self.should_exit or is_over or not self._service.client.num_live
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more and waits for what is still being written, up to the end of the drain time."""
        left_s = max(0.0, self._deadline_s - asyncio.get_running_loop().time())
        self.config.timeout_graceful_shutdown = int(left_s) + CANCEL_AFTER_S
        await super().shutdown(sockets)

    def drain(self) -> None:
        """Begins to stop."""
        client, loop = self._service.client, asyncio.get_running_loop()
        logger.info("stopping: %d streams may take %g s to finish", client.num_live, self._drain_timeout_s)
        client.drain()
        self._service.draining.set()
        self._deadline_s = loop.time() + self._drain_timeout_s
        loop.call_at(self._deadline_s, client.fail_all, "The server is shutting down.")
        loop.call_at(self._deadline_s + CUT_OFF_AFTER_S, self._cut_off)
        for connection in list(self.server_state.connections):
            connection.shutdown()

    def _cut_off(self) -> None:
        """Drops what is left of the HTTP connections; WebSockets look after themselves."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, LimitedHttpProtocol):
                connection.transport.abort()

    def _stop(self, number: int) -> None:
        if number in self._received:
            os._exit(128 + number)
        self._received.add(number)
        if not self._service.draining.is_set():
            self.drain()


def build_server(
    app: ASGIApp, service: Service, config: Config, on_started: Callable[[], None]
) -> FrontendServer:
    """The HTTP server, to be run with `serve(sockets=[…])`.

    Raises:
        ConfigError: a file for HTTPS cannot be used.
    """
    settings = http_settings(app, config, lifespan="on")
    return FrontendServer(settings, service, config.supervisor.drain_timeout, on_started)


def http_settings(app: ASGIApp, config: Config, lifespan: Literal["on", "off"]) -> uvicorn.Config:
    """uvicorn's settings for whatever answers on this server's port.

    Raises:
        ConfigError: a file for HTTPS cannot be used.
    """
    server = config.server
    context = server_context(config.tls)
    # uvicorn calls them with arguments of its own, so that a class is as good as a function.
    http: Any = partial(LimitedHttpProtocol, limits=HeadLimits.of(server))
    websocket: Any = partial(StreamSocketProtocol, write_timeout_s=config.api.stream_write_timeout)
    settings = uvicorn.Config(
        app,
        http=http,
        ws=websocket,
        ws_max_size=server.max_body_bytes + ENVELOPE_BYTES,
        ws_ping_interval=server.ws_ping_interval,
        ws_ping_timeout=server.ws_ping_timeout,
        # Text that comes a few bytes at a time gains little from it, and each message would pay.
        ws_per_message_deflate=False,
        loop="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=server.root_path,
        forwarded_allow_ips=list(server.forwarded_allow_ips),
        timeout_keep_alive=server.keep_alive_timeout,
    )
    settings.load()
    settings.ssl = context
    return settings
