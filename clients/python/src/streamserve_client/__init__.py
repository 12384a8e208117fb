"""Client for a streamserve server: chats, completions and responses, whole or as they are made.

    from streamserve_client import Client

    with Client("http://127.0.0.1:8000") as client:
        for text in client.completions.stream("Once upon a time", max_tokens=30).texts():
            print(text, end="", flush=True)

`Client` blocks, `AsyncClient` is for asyncio; both speak SSE and WebSocket.
"""

from streamserve_client.accumulators import text_of
from streamserve_client.async_client import AsyncClient, AsyncStream
from streamserve_client.documents import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Response,
    ResponseEvent,
    Usage,
)
from streamserve_client.errors import (
    AnswerTimeout,
    APIError,
    AuthenticationFailed,
    BadRequest,
    ClientError,
    ConnectionFailed,
    InvalidAnswer,
    NotFound,
    PermissionDenied,
    RateLimited,
    ServerFailed,
    ServiceUnavailable,
    StreamInterrupted,
)
from streamserve_client.options import ChatOptions, CompletionOptions, ResponseOptions
from streamserve_client.retries import Retries
from streamserve_client.settings import Timeouts
from streamserve_client.sync_client import Client, Stream

__all__ = [
    "APIError",
    "AnswerTimeout",
    "AsyncClient",
    "AsyncStream",
    "AuthenticationFailed",
    "BadRequest",
    "ChatChunk",
    "ChatCompletion",
    "ChatOptions",
    "Client",
    "ClientError",
    "Completion",
    "CompletionOptions",
    "ConnectionFailed",
    "InvalidAnswer",
    "NotFound",
    "PermissionDenied",
    "RateLimited",
    "Response",
    "ResponseEvent",
    "ResponseOptions",
    "Retries",
    "ServerFailed",
    "ServiceUnavailable",
    "Stream",
    "StreamInterrupted",
    "Timeouts",
    "Usage",
    "text_of",
]
