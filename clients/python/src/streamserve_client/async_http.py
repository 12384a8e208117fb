"""Requests over HTTP, and streams over SSE, for the asyncio client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
from httpx_sse import EventSource, SSEError

from streamserve_client.endpoints import Call
from streamserve_client.errors import ClientError, InvalidAnswer
from streamserve_client.http_messages import (
    DONE,
    LIMITS,
    document_of,
    error_of,
    failure,
    limit_silence,
    loss,
    parse_object,
    request_timeout,
)
from streamserve_client.settings import Settings


class AsyncHttpTransport:
    """One connection for each request that is being answered; a stream that is left early closes its own.

    Args:
        settings: where the server is.
        client: sends the requests; whoever gives one closes it. By default one is made.
    """

    def __init__(self, settings: Settings, client: httpx.AsyncClient | None) -> None:
        self._settings = settings
        self._is_ours = client is None
        self._client = client or httpx.AsyncClient(limits=LIMITS)

    async def answer(self, call: Call) -> dict[str, Any]:
        """The answer in one piece.

        Raises:
            ClientError: there is none.
        """
        try:
            response = await self._client.send(self._request("POST", call.path, call.body))
        except httpx.HTTPError as error:
            raise failure(error) from error
        return document_of(response)

    async def delete(self, path: str) -> None:
        """Ends what is at `path`.

        Raises:
            ClientError: it could not.
        """
        try:
            response = await self._client.send(self._request("DELETE", path, None))
        except httpx.HTTPError as error:
            raise failure(error) from error
        document_of(response)

    async def events(self, call: Call) -> AsyncGenerator[dict[str, Any] | None]:
        """The JSON objects of a stream, and None where it says that they are all. Hot: one turn a chunk.

        Raises:
            ClientError: it broke, or there is none.
        """
        async with self._opened(call) as response, aclosing(EventSource(response).aiter_sse()) as events:
            try:
                async for event in events:
                    if event.data == DONE:
                        yield None
                    elif event.data:
                        yield parse_object(event.data)
            except SSEError as error:
                raise InvalidAnswer(str(error)) from error
            except httpx.HTTPError as error:
                raise loss(error) from error

    async def close(self) -> None:
        """Closes all connections."""
        if self._is_ours:
            await self._client.aclose()

    @asynccontextmanager
    async def _opened(self, call: Call) -> AsyncIterator[httpx.Response]:
        try:
            response = await self._client.send(self._request("POST", call.path, call.body), stream=True)
        except httpx.HTTPError as error:
            raise failure(error) from error
        try:
            limit_silence(response, self._settings.timeouts)
            if not response.is_success:
                raise await self._error_of(response)
            yield response
        finally:
            await response.aclose()

    async def _error_of(self, response: httpx.Response) -> ClientError:
        try:
            await response.aread()
        except httpx.HTTPError as error:
            return loss(error)
        return error_of(response)

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Request:
        return self._client.build_request(
            method,
            self._settings.base_url + path,
            json=body,
            headers=self._settings.headers,
            timeout=request_timeout(self._settings.timeouts),
        )
