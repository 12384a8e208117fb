"""Requests over HTTP, and streams over SSE, for the blocking client."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
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


class HttpTransport:
    """One connection for each request that is being answered; a stream that is left early closes its own.

    Args:
        settings: where the server is.
        client: sends the requests; whoever gives one closes it. By default one is made.
    """

    def __init__(self, settings: Settings, client: httpx.Client | None) -> None:
        self._settings = settings
        self._is_ours = client is None
        self._client = client or httpx.Client(limits=LIMITS)

    def answer(self, call: Call) -> dict[str, Any]:
        """The answer in one piece.

        Raises:
            ClientError: there is none.
        """
        try:
            response = self._client.send(self._request("POST", call.path, call.body))
        except httpx.HTTPError as error:
            raise failure(error) from error
        return document_of(response)

    def delete(self, path: str) -> None:
        """Ends what is at `path`.

        Raises:
            ClientError: it could not.
        """
        try:
            response = self._client.send(self._request("DELETE", path, None))
        except httpx.HTTPError as error:
            raise failure(error) from error
        document_of(response)

    def events(self, call: Call) -> Generator[dict[str, Any] | None]:
        """The JSON objects of a stream, and None where it says that they are all. Hot: one turn a chunk.

        Raises:
            ClientError: it broke, or there is none.
        """
        with self._opened(call) as response:
            try:
                for event in EventSource(response).iter_sse():
                    if event.data == DONE:
                        yield None
                    elif event.data:
                        yield parse_object(event.data)
            except SSEError as error:
                raise InvalidAnswer(str(error)) from error
            except httpx.HTTPError as error:
                raise loss(error) from error

    def close(self) -> None:
        """Closes all connections."""
        if self._is_ours:
            self._client.close()

    @contextmanager
    def _opened(self, call: Call) -> Iterator[httpx.Response]:
        try:
            response = self._client.send(self._request("POST", call.path, call.body), stream=True)
        except httpx.HTTPError as error:
            raise failure(error) from error
        try:
            limit_silence(response, self._settings.timeouts)
            if not response.is_success:
                raise self._error_of(response)
            yield response
        finally:
            response.close()

    def _error_of(self, response: httpx.Response) -> ClientError:
        try:
            response.read()
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
