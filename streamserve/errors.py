"""Everything this package raises on purpose, with the blame in the type.

StreamserveError
├── ConfigError          the operator's: a flag, a path, a port, too little memory
├── RequestError         the caller's: answered 4xx, names the parameter
│   ├── InvalidRequest       400
│   ├── ContextTooLong       400, code context_length_exceeded
│   ├── ModelNotFound        404
│   └── BodyTooLarge         413
├── Overloaded           nobody's: answered 429 with Retry-After
├── Expired              nobody's: the request's time in the queue ran out, 503 with Retry-After
├── EngineUnavailable    ours, passing: the engine is loading, draining or gone, 503 with Retry-After
└── RequestFailed        ours: this one request failed in the engine, 500
    └── RequestPoisonous   and the engine with it
"""

from __future__ import annotations


class StreamserveError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(StreamserveError):
    """The server cannot run as configured; the message names the option and the remedy."""


class RequestError(StreamserveError):
    """The caller's request cannot be served as it is.

    Args:
        message: what is wrong and what would be right, for a person.
        param: the request field at fault, or None when it is the body as a whole.
    """

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RequestError):
    """A field is missing, of the wrong type or out of range."""


class ContextTooLong(RequestError):
    """Prompt (and asked-for output) exceed what the model or its KV cache can hold."""

    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    """The named model is not the one served here."""

    status = 404
    code = "model_not_found"


class BodyTooLarge(RequestError):
    """The HTTP body is over the server's limit."""

    status = 413
    code = "body_too_large"


class Overloaded(StreamserveError):
    """The waiting queue is full; the request was not accepted.

    Args:
        message: what limit was hit.
        retry_after_s: whole seconds after which a retry is likely to be accepted.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Expired(StreamserveError):
    """The request had not begun to run by its deadline, and never will.

    Args:
        message: what ran out.
        retry_after_s: whole seconds after which a retry is likely to get its turn in time.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(StreamserveError):
    """The engine is loading, draining, restarting or gone.

    Attributes:
        retry_after_s: whole seconds after which it is worth another try.
    """

    retry_after_s = 5


class RequestFailed(StreamserveError):
    """The engine could not finish this request; others are not affected."""


class RequestPoisonous(RequestFailed):
    """The engine died of this request, time after time. To ask for it again would be no better."""
