"""The HTTP side of endpoints: a body in; one JSON document or a stream of events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, NoReturn, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from streamserve.frontend.api.body import read_json
from streamserve.frontend.api.endpoint import Call, Divertible, Endpoint, tenant_of
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.sse import EventStream, Framing

Result = TypeVar("Result")


def document(body: Any, status: int = 200) -> Response:
    """A JSON document that is true now; no cache may keep it."""
    return Response(orjson.dumps(body), status, {"Cache-Control": "no-store"}, "application/json")


class HttpTransport:
    """Serves an endpoint to HTTP requests. Until the first output, an error is an ordinary response.

    Args:
        service: limits on bodies and streams.
        endpoint: what answers.
    """

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint
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
        batches = answer.batches()
        first = await first_batch(http.receive, batches)
        return EventStream(
            first,
            batches,
            self._framing,
            divert=answer.divert if isinstance(answer, Divertible) and answer.is_divertible else None,
            ping_interval_s=service.ping_interval_s,
            write_timeout_s=service.write_timeout_s,
        )


async def until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled if the client leaves first.

    A server under ASGI 2.3 says that a client has left only to somebody who asks; a queued request or one in
    prefill writes nothing, so nothing else would notice.

    Raises:
        ClientDisconnect: the client left.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(receive))
            result = await work
            watcher.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return result


async def _watch(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def first_batch(receive: Receive, batches: AsyncGenerator[list[bytes], None]) -> list[bytes]:
    """The first of `batches`, which are closed if there is none.

    Raises:
        ClientDisconnect: the client left before.
    """
    try:
        return await until_disconnect(receive, anext(batches))
    except BaseException:
        await batches.aclose()
        raise
