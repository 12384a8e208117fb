"""Everything that this package raises on purpose.

ClientError
├── ConnectionFailed       no answer: nobody listens, or the connection broke before anything of it had come
├── AnswerTimeout          no answer within Timeouts.answer_s
├── StreamInterrupted      a stream broke off and cannot be gone on with; has what had come by then
├── InvalidAnswer          what came is not an answer of this API
└── APIError               the server says what is wrong: status, type, code, param, message
    ├── BadRequest             400, 413, 422 and what else is the caller's fault
    ├── AuthenticationFailed   401
    ├── PermissionDenied       403
    ├── NotFound               404
    ├── RateLimited            429
    └── ServerFailed           500 and above
        └── ServiceUnavailable     503
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# After these it makes sense to ask again.
RETRYABLE_STATUSES = (429, 503)


class ClientError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConnectionFailed(ClientError):
    """There was no connection, or it broke before anything of the answer had come."""


class AnswerTimeout(ClientError):
    """The answer did not begin in time."""


class InvalidAnswer(ClientError):
    """What came is not an answer of this API; perhaps another server listens there."""


class StreamInterrupted(ClientError):
    """A stream broke off before its end, and the server does not give the rest: it does not keep streams, has
    dropped this one, or cannot be reached.

    Args:
        message: what broke it.
        partial_text: what had come of the first choice.
        partial_answer: what had come, in the form of a whole answer.
    """

    def __init__(self, message: str, partial_text: str, partial_answer: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.partial_text = partial_text
        self.partial_answer = partial_answer


class APIError(ClientError):
    """The server's error object.

    Args:
        message: for a person.
        status: of HTTP; None for the error of a stream that had begun, over SSE.
        type: kind of error, such as `invalid_request_error`.
        code: the exact error, such as `context_length_exceeded`.
        param: the field at fault, if it is one.
        retry_after_s: seconds after which the server says that another try makes sense.
        request_id: what the server calls the request in its log, where it says so.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.request_id = request_id

    def __str__(self) -> str:
        marks = [str(mark) for mark in (self.status, self.code) if mark is not None]
        return f"{self.message} ({', '.join(marks)})" if marks else self.message


class BadRequest(APIError):
    """The request is at fault; `param` names the field, if it is one."""


class AuthenticationFailed(APIError):
    """The server wants a key, or another one."""


class PermissionDenied(APIError):
    """The key is not enough for this, or the server does not answer this web page."""


class NotFound(APIError):
    """There is no such model, path or stream."""


class RateLimited(APIError):
    """The server is busy; `retry_after_s` says when to come again."""


class ServerFailed(APIError):
    """The server's fault."""


class ServiceUnavailable(ServerFailed):
    """The server is loading, stopping or too busy; `retry_after_s` says when to come again."""


_OF_STATUS: dict[int, type[APIError]] = {
    401: AuthenticationFailed,
    403: PermissionDenied,
    404: NotFound,
    429: RateLimited,
    503: ServiceUnavailable,
}
# In a stream that has begun there is no status.
_OF_TYPE: dict[str, type[APIError]] = {
    "invalid_request_error": BadRequest,
    "rate_limit_error": RateLimited,
    "service_unavailable_error": ServiceUnavailable,
}


def api_error(
    error: Any,
    *,
    status: int | None = None,
    retry_after_s: float | None = None,
    request_id: str | None = None,
) -> APIError:
    """The exception for an error object.

    Args:
        error: the object behind `error` in a body, an event or a message. Proxies send anything here.
    """
    fields: Mapping[str, Any] = error if isinstance(error, dict) else {"message": error}
    answered = "the server told of an error" if status is None else f"the server answered {status}"
    message = str(fields.get("message") or answered)
    kind, code, param = (_text(fields.get(name)) for name in ("type", "code", "param"))
    return _class_of(status, kind)(
        message,
        status=status,
        type=kind,
        code=code,
        param=param,
        retry_after_s=retry_after_s,
        request_id=request_id,
    )


def _class_of(status: int | None, kind: str | None) -> type[APIError]:
    if status is None:
        return _OF_TYPE.get(kind or "", ServerFailed)
    return _OF_STATUS.get(status) or (ServerFailed if status >= 500 else BadRequest)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
