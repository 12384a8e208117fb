"""Probes, numbers and control: what operators and their tools ask for."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response

from streamserve import __version__
from streamserve.errors import EngineUnavailable, InvalidRequest
from streamserve.frontend.api.http import document
from streamserve.frontend.api.problems import Problem
from streamserve.frontend.api.service import Service
from streamserve.frontend.deep_health import DeepHealth
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.exposition import CONTENT_TYPE, EngineNumbers, Exposition
from streamserve.frontend.monitor import Monitor
from streamserve.frontend.status import ServerStatus

# An engine in a long step answers late; the numbers of the last one are then better than none.
FRESH_TIMEOUT_S = 5.0
_DEEP = {"0": False, "false": False, "1": True, "true": True}


class Control:
    """The endpoints.

    Args:
        service: what is served.
        deployment: what is around it.
        monitor: looks at what is shown in metrics.
    """

    def __init__(self, service: Service, deployment: Deployment, monitor: Monitor) -> None:
        self._service = service
        self._monitor = monitor
        self._status = ServerStatus(service.client, deployment.board, deployment.progress)
        self._deep = DeepHealth(service, deployment.server.deep_health_timeout)
        row = service.registry.metrics.row
        rows = deployment.rows if deployment.rows is not None else row.cells.cast("B")
        self._exposition = Exposition(row.layout, rows, service.model_name, deployment.supervisor)

    async def live(self, _http: Request) -> Response:
        """200 as long as this process turns its event loop; a reason to restart it if it does not come."""
        return document({"status": "ok"})

    async def ready(self, _http: Request) -> Response:
        """200 while new requests are accepted, else 503 with the reason, and with how far a start is."""
        body = self._status.describe()
        return document(body, 200 if body["status"] == "ok" else 503)

    async def health(self, http: Request) -> Response:
        """200 while the engine answers its heartbeat and requests are accepted, else 503.

        With `?deep=1`, only if a token has just gone through everything.

        Raises:
            InvalidRequest: `deep` is no such word.
        """
        deep = http.query_params.getlist("deep") or ["0"]
        if any(word not in _DEEP for word in deep):
            raise InvalidRequest(f"deep must be one of {', '.join(_DEEP)}.", "deep")
        body = self._status.describe()
        if body["status"] == "ok" and _DEEP[deep[-1]]:
            is_well, details = await self._deep.check()
            body = {"status": "ok" if is_well else "failed", **details}
        return document(body, 200 if body["status"] == "ok" else 503)

    async def ping(self, http: Request) -> Response:
        """`health` under the name that some platforms ask for."""
        return await self.health(http)

    async def load(self, _http: Request) -> Response:
        """How busy the engine is right now: requests running and waiting, KV blocks, counters.

        Raises:
            EngineUnavailable: there is no engine.
        """
        gauges = await self._service.client.fresh_gauges()
        return document({"server_load": gauges["running"] + gauges["waiting"], **gauges})

    async def version(self, _http: Request) -> Response:
        """The version of this server."""
        return document({"version": __version__})

    async def metrics(self, _http: Request) -> Response:
        """Everything that is counted, of all frontends and the engine, for Prometheus."""
        client = self._service.client
        with contextlib.suppress(EngineUnavailable, TimeoutError):
            async with asyncio.timeout(FRESH_TIMEOUT_S):
                await client.fresh_gauges()
        self._monitor.sample()
        known = client.latest()
        engine = None if known is None else EngineNumbers(*known)
        text = self._exposition.render(engine, self._status.num_restarts)
        return Response(text, 200, {"Cache-Control": "no-store"}, CONTENT_TYPE)

    async def reset_prefix_cache(self, _http: Request) -> Response:
        """Forgets all prompts in the prefix cache; requests that run keep what they have.

        Raises:
            EngineUnavailable: there is no engine.
        """
        reply = await self._service.client.call({"method": "reset_prefix_cache"})
        if reply["ok"]:
            return document({"ok": True})
        message = "This server has no prefix cache; it runs with --no-enable-prefix-caching."
        return Problem(409, "conflict_error", "no_prefix_cache", message).response()
