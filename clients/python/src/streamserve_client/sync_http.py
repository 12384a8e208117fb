"""Requests over HTTP, and streams over SSE, for the blocking client."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from httpx_sse import EventSource

from streamserve_client.endpoints import Call
from streamserve_client.errors import ClientError
from streamserve_client.http_messages import (
    ABANDON_S,
    DONE,
    EVENT_STREAM,
    LIMITS,
    RESUME_HEADERS,
    STREAM_HEADER,
    UNSENT,
    check_first,
    document_of,
    error_of,
    expect_events,
    failure,
    limit_silence,
    loss,
    parse_object,
    request_timeout,
    return_timeout,
)
from streamserve_client.place import Place
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
        self._is_closed = False
        self._client = client or httpx.Client(limits=LIMITS)

    def answer(self, call: Call) -> dict[str, Any]:
        """The answer in one piece.

        Raises:
            ClientError: there is none.
        """
        try:
            response = self._send(self._request("POST", call.path, call.body))
        except httpx.HTTPError as error:
            raise failure(error) from error
        return document_of(response)

    def delete(self, path: str, limit_s: float | None = None) -> None:
        """Ends what is at `path`.

        Args:
            path: of a stream.
            limit_s: for each part of that; None for the ordinary limits.

        Raises:
            ClientError: it could not.
        """
        request = self._request("DELETE", path, None)
        if limit_s is not None:
            request.extensions["timeout"] = httpx.Timeout(limit_s).as_dict()
        try:
            response = self._send(request)
        except httpx.HTTPError as error:
            raise failure(error) from error
        document_of(response)

    def abandon(self, path: str) -> None:
        """Ends the stream at `path` if that takes no time; raises nothing. A server that cannot be reached
        ends it by itself, later."""
        with contextlib.suppress(ClientError):
            self.delete(path, ABANDON_S)

    def events(self, call: Call, place: Place) -> Generator[dict[str, Any] | None]:
        """The JSON objects of a stream, and None where it says that they are all. Hot: one turn a chunk.

        Args:
            call: the request.
            place: where the stream is; moves on with it.

        Raises:
            ClientError: it broke, or there is none.
        """
        with self._opened(call, place) as response:
            is_first = place.num_events == 0
            try:
                for event in EventSource(response).iter_sse():
                    if not event.data or not place.takes(event.id):
                        continue
                    chunk = None if event.data == DONE else parse_object(event.data)
                    if is_first:
                        is_first = False
                        check_first(chunk, place)
                    yield chunk
            except httpx.HTTPError as error:
                raise loss(error) from error

    def close(self) -> None:
        """Closes all connections."""
        self._is_closed = True
        if self._is_ours:
            self._client.close()

    @contextmanager
    def _opened(self, call: Call, place: Place) -> Iterator[httpx.Response]:
        request = self._return_request(place) if place.has_come_back else self._first_request(call, place)
        place.sent()
        try:
            response = self._send(request, stream=True)
        except httpx.HTTPError as error:
            if isinstance(error, UNSENT):
                place.unsent()
            raise (loss if place.num_events else failure)(error) from error
        try:
            limit_silence(response, self._settings.timeouts)
            if not response.is_success:
                raise self._error_of(response)
            expect_events(response)
            place.attach(response.headers.get(STREAM_HEADER) if place.is_kept else None)
            yield response
        finally:
            response.close()

    def _send(self, request: httpx.Request, *, stream: bool = False) -> httpx.Response:
        if self._is_closed or self._client.is_closed:
            raise ClientError("the client is closed")
        return self._client.send(request, stream=stream)

    def _error_of(self, response: httpx.Response) -> ClientError:
        try:
            response.read()
        except httpx.HTTPError as error:
            return loss(error)
        return error_of(response)

    def _first_request(self, call: Call, place: Place) -> httpx.Request:
        request = self._request("POST", call.path, call.body)
        if place.is_kept:
            request.headers.update(RESUME_HEADERS)
            if "request_id" not in call.body:
                request.headers["X-Request-Id"] = place.request_id
        return request

    def _return_request(self, place: Place) -> httpx.Request:
        request = self._request("GET", place.path, None)
        request.headers["Accept"] = EVENT_STREAM
        if place.num_events:
            request.headers["Last-Event-ID"] = place.event_id
            request.extensions["timeout"] = return_timeout(self._settings.timeouts).as_dict()
        return request

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Request:
        return self._client.build_request(
            method,
            self._settings.base_url + path,
            json=body,
            headers=self._settings.headers,
            timeout=request_timeout(self._settings.timeouts),
        )
