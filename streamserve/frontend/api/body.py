"""Reading and parsing a request body without trusting it."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from streamserve.errors import InvalidRequest, RequestError
from streamserve.frontend.api.problems import RequestTimeout
from streamserve.frontend.api.structure import MAX_VALUES, SMALL_BYTES, check_structure

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
    """What a body may be.

    Attributes:
        max_bytes: how long.
        error: what to say of a longer one.
        max_values: how rich (streamserve.frontend.api.structure).
        threads: where that is looked at.
        timeout_s: how long it may take to arrive.
    """

    max_bytes: int
    error: RequestError
    max_values: int
    threads: Executor
    timeout_s: float = BODY_TIMEOUT_S


async def read_json(headers: Headers, receive: Receive, limit: BodyLimit) -> Body:
    """The JSON object in the body.

    Raises:
        InvalidRequest: not JSON, not UTF-8, no object, too rich, nested too deeply, or another content type.
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
    return Body(await checked_object(body, limit), len(body))


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


async def checked_object(text: bytes, limit: BodyLimit) -> dict[str, Any]:
    """The JSON object in a text of any size.

    Raises:
        InvalidRequest: it is none, too rich, or nested too deeply.
    """
    if len(text) <= SMALL_BYTES:
        return small_object(text)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(limit.threads, check_structure, text, limit.max_values)
    return parse_object(text)


def small_object(text: bytes) -> dict[str, Any]:
    """The JSON object in a text of at most SMALL_BYTES.

    Raises:
        InvalidRequest: it is none, or nested too deeply.
    """
    check_structure(text, MAX_VALUES)
    return parse_object(text)


def parse_object(text: bytes) -> dict[str, Any]:
    """The JSON object in a text whose structure was looked at.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        data = _loads(text)
    except orjson.JSONDecodeError as error:
        # The error's text names a place and a rule but quotes nothing of a body in some unknown encoding.
        raise InvalidRequest(f"The request body is not valid JSON in UTF-8: {error}.") from None
    if not isinstance(data, dict):
        raise InvalidRequest("The request body must be a JSON object.")
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
