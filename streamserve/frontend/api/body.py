"""Reading and parsing a request body without trusting it."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from streamserve.errors import InvalidRequest, RequestError
from streamserve.frontend.api.problems import RequestTimeout

MAX_DEPTH = 100
LARGE_BYTES = 1 << 20
BODY_TIMEOUT_S = 120.0


# What a client says that was not told what it sends: nothing, or what `curl -d` says of everything.
UNSAID = ("", "application/x-www-form-urlencoded")


@dataclass(frozen=True, slots=True)
class Body:
    """A parsed body and its size."""

    data: dict[str, Any]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """How long a body may be, what to say of a longer one, and how long it may take to arrive."""

    max_bytes: int
    error: RequestError
    timeout_s: float = BODY_TIMEOUT_S


async def read_json(headers: Headers, receive: Receive, limit: BodyLimit) -> Body:
    """The JSON object in the body.

    Raises:
        InvalidRequest: not JSON, not UTF-8, not an object, nested too deeply, or another content type.
        RequestError: it is over the limit.
        RequestTimeout: it did not arrive in time.
        ClientDisconnect: the client went away.
    """
    content_type = headers.get("content-type", "")
    if not is_json(content_type) and _essence(content_type) not in UNSAID:
        raise InvalidRequest("The content type must be application/json.")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit.max_bytes:
        raise limit.error
    try:
        async with asyncio.timeout(limit.timeout_s):
            body = await _read(receive, limit)
    except TimeoutError:
        raise RequestTimeout("The request body took too long to arrive.") from None
    return Body(parse_object(body), len(body))


def is_json(content_type: str) -> bool:
    """Whether a Content-Type header says JSON."""
    essence = _essence(content_type)
    return essence == "application/json" or essence.endswith("+json")


def _essence(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


async def _read(receive: Receive, limit: BodyLimit) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit.max_bytes:
            raise limit.error
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        InvalidRequest: it is none, or nested more than MAX_DEPTH deep.
    """
    try:
        data = _loads(body)
    except orjson.JSONDecodeError as error:
        # The error's text names a place and a rule but quotes nothing of a body in some unknown encoding.
        raise InvalidRequest(f"The request body is not valid JSON in UTF-8: {error}.") from None
    if not isinstance(data, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    # Only a body with that many brackets can be that deep; nearly none has, and the walk is saved.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(data, MAX_DEPTH):
        raise InvalidRequest(f"The request body is nested more than {MAX_DEPTH} levels deep.")
    return data


def _loads(body: bytes) -> Any:
    """Parses `body`, without the garbage collector in a large one.

    It would look at all containers again and again while they are made, and be most of the time that a body
    of many takes. A thread would be of no use: the parser keeps the interpreter lock to its end.
    """
    if len(body) <= LARGE_BYTES or not gc.isenabled():
        return orjson.loads(body)
    gc.disable()
    try:
        return orjson.loads(body)
    finally:
        gc.enable()


def _is_deeper(data: Any, limit: int) -> bool:
    """Whether containers in `data` are nested more than `limit` deep. Not recursive itself."""
    level = [data]
    for _ in range(limit):
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True
