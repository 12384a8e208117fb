"""Exceptions to HTTP: one table, one form of body.

Every error, 404 and 405 included, is `{"error": {"message", "type", "param", "code"}}`. An error after a
stream has started is the same object as its last event, without a `[DONE]` after it; a response has events of
its own for that (streamserve.frontend.api.response_events).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from streamserve.errors import (
    BodyTooLarge,
    EngineUnavailable,
    Expired,
    Overloaded,
    RequestError,
    RequestFailed,
    RequestPoisonous,
    StreamserveError,
)


class RequestTimeout(RequestError):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the client sees it."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    @property
    def retry_after_s(self) -> int | None:
        """After how many seconds another try makes sense, if the error says so."""
        return next((int(value) for name, value in self.headers if name == "Retry-After"), None)

    @property
    def full_error(self) -> dict[str, Any]:
        """The error object, with what status line and headers say where there are some."""
        retry_s = self.retry_after_s
        retry = {} if retry_s is None else {"retry_after": retry_s}
        return {**self.error, "status": self.status, **retry}

    def encode(self) -> bytes:
        """The JSON body."""
        return orjson.dumps({"error": self.error})

    def response(self) -> Response:
        """The whole HTTP response."""
        return Response(self.encode(), self.status, dict(self.headers), "application/json")


class Told(StreamserveError):
    """What another frontend says is wrong.

    Args:
        problem: in its words.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


# Not caused by the caller: (status, type, code). The first match counts.
_OURS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (Expired, 503, "service_unavailable_error", "queue_time_exceeded"),
    (EngineUnavailable, 503, "service_unavailable_error", "engine_unavailable"),
    (RequestFailed, 500, "server_error", "request_failed"),
    (Exception, 500, "server_error", "internal_error"),
)


def problem_of(error: Exception) -> Problem:
    """What `error` looks like from outside. Of a fault of our own, only that there was one."""
    if isinstance(error, RequestError):
        # The rest of a body that was not read is not waited for.
        is_unread = isinstance(error, RequestTimeout | BodyTooLarge)
        headers = (("Connection", "close"),) if is_unread else ()
        return Problem(error.status, "invalid_request_error", error.code, error.message, error.param, headers)
    if isinstance(error, Told):
        return error.problem
    if isinstance(error, HTTPException):
        return _of_status(error)
    for kind, status, type_name, code in _OURS:
        if isinstance(error, kind):
            message = (
                str(error) if isinstance(error, StreamserveError) else "The server failed on this request."
            )
            return Problem(status, type_name, code, message, None, _retry_headers(error))
    raise AssertionError(f"no row for {error!r}")


def _retry_headers(error: Exception) -> tuple[tuple[str, str], ...]:
    if isinstance(error, Overloaded | Expired | EngineUnavailable):
        return (("Retry-After", str(error.retry_after_s)),)
    # What OpenAI's clients go by, who else try again after any 500.
    return (("x-should-retry", "false"),) if isinstance(error, RequestPoisonous) else ()


def _of_status(error: HTTPException) -> Problem:
    phrase = HTTPStatus(error.status_code).phrase
    code = phrase.lower().replace(" ", "_")
    headers = tuple((error.headers or {}).items())
    return Problem(error.status_code, "invalid_request_error", code, f"{error.detail}.", None, headers)


async def handle(_request: Request, error: Exception) -> Response:
    """Starlette's exception handler for everything."""
    return problem_of(error).response()


async def handle_fault(_request: Request, error: Exception) -> Response:
    """The handler for faults of our own. The server closes the connection after one; this says so."""
    problem = problem_of(error)
    return replace(problem, headers=(*problem.headers, ("Connection", "close"))).response()


async def handle_disconnect(_request: Request, _error: Exception) -> Response:
    """There is nobody to answer; the status is for the log only."""
    return Response(status_code=499)


HANDLERS: dict[Any, Any] = {
    ClientDisconnect: handle_disconnect,
    StreamserveError: handle,
    HTTPException: handle,
    Exception: handle_fault,
}
