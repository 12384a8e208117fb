"""The HTTP side of endpoints: a body in; one JSON document or a stream of events out."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from streamserve.frontend.api.body import read_json
from streamserve.frontend.api.endpoint import Call, Divertible, Endpoint, tenant_of
from streamserve.frontend.api.resume import ASK_HEADER, Resumption
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.sse import EventStream, Framing
from streamserve.frontend.api.waiting import first_batch, until_disconnect


def document(body: Any, status: int = 200) -> Response:
    """A JSON document that is true now; no cache may keep it."""
    return Response(orjson.dumps(body), status, {"Cache-Control": "no-store"}, "application/json")


class HttpTransport:
    """Serves an endpoint to HTTP requests.

    Until the first output, an error is an ordinary response. A stream that has to wait for that longer than
    it is ever silent begins without it, so that clients and proxies know a queue from a lost connection.

    Args:
        service: limits on bodies and streams.
        endpoint: what answers.
        resumption: begins streams that outlive their connections.
    """

    def __init__(self, service: Service, endpoint: Endpoint, resumption: Resumption) -> None:
        self._service = service
        self._endpoint = endpoint
        self._resumption = resumption
        self._framing = Framing(names_events=endpoint.names_events)

    async def handle(self, http: Request) -> Response:
        """Answers one request."""
        service = self._service
        body = await read_json(http.headers, http.receive, service.body_limit())
        # Whatever the caller sent, this one is fit for an answer's id (streamserve.frontend.middleware).
        request_id = http.headers["x-request-id"]
        call = Call(body.data, body.num_bytes, request_id, tenant_of(http.scope))
        answer = await until_disconnect(http.receive, self._endpoint.accept(call))
        if not answer.is_stream:
            whole = await until_disconnect(http.receive, answer.whole())
            return Response(whole, media_type="application/json")
        if answer.asks_resume or http.headers.get(ASK_HEADER) == "1":
            names_events = self._endpoint.names_events
            reading = self._resumption.begin(answer, call, names_events=names_events)
            if reading is not None:
                return await self._resumption.respond(http.receive, reading, service.ping_interval_s)
        batches = answer.batches()
        first = await first_batch(http.receive, batches, service.ping_interval_s)
        return EventStream(
            first,
            batches,
            self._framing,
            divert=answer.divert if isinstance(answer, Divertible) and answer.is_divertible else None,
            ping_interval_s=service.ping_interval_s,
            write_timeout_s=service.write_timeout_s,
        )
