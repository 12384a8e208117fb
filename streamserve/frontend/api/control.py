"""GET /health, /load and /version."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from streamserve import __version__
from streamserve.frontend.api.service import Service
from streamserve.ipc.board import EngineState

_STATUS = {
    EngineState.STARTING: "loading",
    EngineState.READY: "ok",
    EngineState.DRAINING: "draining",
    EngineState.DEAD: "dead",
}


class Control:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _http: Request) -> Response:
        """200 while the engine answers its heartbeat and requests are accepted, else 503."""
        client = self._service.client
        if client.is_healthy:
            return _json({"status": "ok"}, 200)
        status = _STATUS[client.state]
        return _json({"status": "stuck" if status == "ok" else status}, 503)

    async def load(self, _http: Request) -> Response:
        """How busy the engine is right now: requests running and waiting, KV blocks, prefix-cache counters.

        Raises:
            EngineUnavailable: there is no engine.
        """
        gauges = await self._service.client.fresh_gauges()
        return _json({"server_load": gauges["running"] + gauges["waiting"], **gauges}, 200)

    async def version(self, _http: Request) -> Response:
        """The version of this server."""
        return _json({"version": __version__}, 200)


def _json(body: dict[str, Any], status: int) -> Response:
    return Response(orjson.dumps(body), status, {"Cache-Control": "no-store"}, "application/json")
