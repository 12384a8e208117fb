"""The dashboard's numbers: one stream of snapshots for each page that is open.

There is no task that takes them: of those who watch, the first to find that the newest snapshot is a second
old takes the next, and all send the same bytes. So a watcher more costs one small write a second, and where
nobody watches nothing is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamserve.errors import EngineUnavailable
from streamserve.frontend import paths
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.sse import EventStream, Framing
from streamserve.frontend.api.waiting import first_batch
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.exposition import EngineNumbers
from streamserve.frontend.monitor import Monitor
from streamserve.frontend.rows import Rows
from streamserve.frontend.snapshots import Snapshots
from streamserve.frontend.status import ServerStatus

INTERVAL_S = 1.0
# An engine in a long step answers late; its last numbers are then shown again.
FRESH_TIMEOUT_S = 1.0


class Dashboard:
    """The endpoint.

    Args:
        service: what is served.
        deployment: what is around it.
        monitor: looks at what is shown.
    """

    def __init__(self, service: Service, deployment: Deployment, monitor: Monitor) -> None:
        self._service = service
        self._monitor = monitor
        self._status = ServerStatus(service.client, deployment.board, deployment.progress)
        row = service.registry.metrics.row
        memory = deployment.rows if deployment.rows is not None else row.cells.cast("B")
        self._snapshots = Snapshots(Rows(row.layout, memory), deployment.supervisor)
        self._num_watchers = row.counter("streamserve:dashboard_watchers")
        self._framing = Framing(names_events=False)
        self._taking = asyncio.Lock()
        self._taken_s = float("-inf")
        self._newest = b""
        is_wanted = deployment.server.dashboard
        self.routes = [Route(paths.DASHBOARD_EVENTS, self.events, methods=["GET"])] if is_wanted else []

    async def events(self, http: Request) -> Response:
        """A snapshot at once, then one a second, until the client leaves or the server drains."""
        service = self._service
        batches = self._batches()
        first = await first_batch(http.receive, batches, service.ping_interval_s)
        return EventStream(
            first,
            batches,
            self._framing,
            ping_interval_s=service.ping_interval_s,
            write_timeout_s=service.write_timeout_s,
        )

    async def _batches(self) -> AsyncGenerator[list[bytes], None]:
        shown_s = float("-inf")
        self._num_watchers.add()
        try:
            while True:
                await self._renew()
                # A timer may go off a little early, and what it waited for is then as old as before.
                if self._taken_s > shown_s:
                    shown_s = self._taken_s
                    yield [self._newest]
                if await self._is_draining_within(shown_s + INTERVAL_S - time.monotonic()):
                    return
        finally:
            self._num_watchers.add(-1)

    async def _is_draining_within(self, seconds: float) -> bool:
        """Waits so long, or until the server drains, which an open stream must not hold up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._service.draining.wait()
        return self._service.draining.is_set()

    async def _renew(self) -> None:
        """Takes the next snapshot, unless another watcher just has."""
        async with self._taking:
            if time.monotonic() < self._taken_s + INTERVAL_S:
                return
            client = self._service.client
            with contextlib.suppress(EngineUnavailable, TimeoutError):
                async with asyncio.timeout(FRESH_TIMEOUT_S):
                    await client.fresh_gauges()
            self._monitor.sample()
            known = client.latest()
            engine = None if known is None else EngineNumbers(*known)
            now_s = time.monotonic()
            snapshot = self._snapshots.take(now_s, engine, self._status.num_restarts)
            self._newest, self._taken_s = orjson.dumps(snapshot), now_s
