"""The HTTP side of a generation endpoint: a body in; one JSON document or a stream of events out."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable
from typing import NoReturn, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from streamserve.frontend.api.body import read_json
from streamserve.frontend.api.endpoint import Call, Divertible, Endpoint, tenant_of
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.sse import EventStream, Framing

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Result = TypeVar("Result")


def request_id(headers: Headers) -> str:
    """The part of an answer's id after its prefix: the caller's X-Request-Id, or a random one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


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
        call = Call(body.data, body.num_bytes, request_id(http.headers), tenant_of(http.scope))
        answer = await until_disconnect(http.receive, self._endpoint.accept(call))
        if not answer.is_stream:
            document = await until_disconnect(http.receive, answer.whole())
            return Response(document, media_type="application/json")
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
