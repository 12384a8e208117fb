"""What requests and answers mean over HTTP, for both clients."""

from __future__ import annotations

import json
from typing import Any

import httpx

from streamserve_client.errors import (
    AnswerTimeout,
    APIError,
    ClientError,
    ConnectionFailed,
    InvalidAnswer,
    api_error,
)
from streamserve_client.place import Place
from streamserve_client.retries import parse_retry_after
from streamserve_client.settings import Timeouts

DONE = "[DONE]"
EVENT_STREAM = "text/event-stream"
RESUME_HEADERS = {"X-Stream-Resume": "1"}
STREAM_HEADER = "X-Stream-Id"
# Nothing has reached the server.
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout)
# For word that nobody wants the rest of a stream.
ABANDON_S = 2.0
# One connection a stream, and as many of them as the caller has.
LIMITS = httpx.Limits(max_connections=None)

_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout, httpx.WriteTimeout)


def request_timeout(timeouts: Timeouts) -> httpx.Timeout:
    """Until the answer begins."""
    return httpx.Timeout(connect=timeouts.connect_s, read=timeouts.answer_s, write=timeouts.idle_s, pool=None)


def return_timeout(timeouts: Timeouts) -> httpx.Timeout:
    """Until a stream that has begun goes on. The server answers with the next event, or not at all."""
    return httpx.Timeout(connect=timeouts.connect_s, read=timeouts.idle_s, write=timeouts.idle_s, pool=None)


def limit_silence(response: httpx.Response, timeouts: Timeouts) -> None:
    """From here on a silence of `idle_s` ends the answer, which has begun; until here it was its turn
    that it waited for."""
    response.request.extensions["timeout"]["read"] = timeouts.idle_s


def expect_events(response: httpx.Response) -> None:
    """Prepares for reading a stream.

    Raises:
        InvalidAnswer: the answer is none.
    """
    kind = response.headers.get("Content-Type", "")
    if kind.partition(";")[0].strip().lower() != EVENT_STREAM:
        raise InvalidAnswer(f"the server sent {kind!r} instead of a stream")
    # Events are always that, whatever a header says; a mark at the beginning is no part of the first one.
    response.encoding = "utf-8-sig"


def failure(error: httpx.HTTPError) -> ClientError:
    """Why there is no answer."""
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ReadTimeout):
        return AnswerTimeout("the answer did not begin in time (Timeouts.answer_s)")
    return (ConnectionFailed if isinstance(error, _BROKEN) else ClientError)(f"no connection: {reason}")


def loss(error: httpx.HTTPError) -> ClientError:
    """Why an answer that had begun stopped."""
    if isinstance(error, httpx.ReadTimeout):
        return ConnectionFailed("nothing came for longer than Timeouts.idle_s")
    return ConnectionFailed(f"the connection broke: {error or type(error).__name__}")


def error_of(response: httpx.Response) -> APIError:
    """The error in a whole answer with a status of 400 or above."""
    headers = response.headers
    body = response.text
    if response.is_redirect:
        # A request that is sent again elsewhere would bring the key there.
        body = f"the server says to go to {headers['Location']!r}; if that is right, give it as url"
    return status_error(response.status_code, body, headers.get("Retry-After"), headers.get("X-Request-Id"))


def status_error(status: int, body: str, retry_after: str | None, request_id: str | None) -> APIError:
    """The error of an answer whose body need not be one of this API's: proxies answer as well."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError, RecursionError):
        error = body.strip()[:200]
    return api_error(
        error, status=status, retry_after_s=parse_retry_after(retry_after), request_id=request_id
    )


def document_of(response: httpx.Response) -> dict[str, Any]:
    """The JSON object in a whole answer.

    Raises:
        APIError: the server says that there is none.
        InvalidAnswer: it is no object.
    """
    if not response.is_success:
        raise error_of(response)
    return parse_object(response.text)


def check_first(event: dict[str, Any] | None, place: Place) -> None:
    """Looks at the first event of a stream.

    Raises:
        APIError: the stream had to wait for it, and has come to nothing; it is what the answer would have
            been, had its headers not been on their way.
    """
    error = event.get("error") if event else None
    if not isinstance(error, dict) or not isinstance(error.get("status"), int):
        return
    place.refused()
    retry_after = error.get("retry_after")
    retry_after_s = None if retry_after is None else parse_retry_after(str(retry_after))
    raise api_error(error, status=error["status"], retry_after_s=retry_after_s)


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object in `text`. Hot: once a chunk.

    Raises:
        InvalidAnswer: it is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidAnswer(f"the server sent something else than a JSON object: {text[:200]!r}")
    return value
