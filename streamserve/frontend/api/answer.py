"""Running a generation for a client that may leave at any moment."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from streamserve.errors import StreamserveError
from streamserve.frontend.api.problems import problem_of
from streamserve.frontend.api.sse import DONE, Chunks, error_event
from streamserve.frontend.client import EngineClient, Generation
from streamserve.frontend.text.assemble import TextAssembler

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Result = TypeVar("Result")


def answer_id(headers: Headers) -> str:
    """The part of an answer's id after its prefix: the caller's X-Request-Id, or a random one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def usage_of(generation: Generation, assembler: TextAssembler) -> dict[str, Any]:
    """The token counts of a finished answer."""
    num_prompt = len(generation.prompt)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": assembler.num_tokens,
        "total_tokens": num_prompt + assembler.num_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


async def until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled if the client leaves first.

    A server under ASGI 2.3 says that a client has left only to somebody who asks; a queued request or one in
    prefill writes nothing, so nothing else would notice.

    Raises:
        ClientDisconnect: the client left.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(receive))
            result = await work
            watcher.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return result


async def _watch(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def collect(client: EngineClient, generation: Generation, assembler: TextAssembler) -> str:
    """The whole text of an answer."""
    parts: list[str] = []
    async with aclosing(client.generate(generation)) as deltas:
        async for tokens, finish in deltas:
            parts.append(assembler.accept(tokens, finish))
            if assembler.finish_reason is not None:
                break
    return "".join(parts)


def whole(
    head: dict[str, Any], content: dict[str, Any], generation: Generation, assembler: TextAssembler
) -> Response:
    """The response that carries an answer in one piece.

    Args:
        head: id, object, created, model.
        content: the choice's text, in the endpoint's form.
    """
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": assembler.finish_reason}
    if assembler.stop_reason is not None:
        choice["stop_reason"] = assembler.stop_reason
    body = {**head, "choices": [choice], "usage": usage_of(generation, assembler)}
    return Response(orjson.dumps(body), media_type="application/json")


async def stream(
    client: EngineClient, generation: Generation, assembler: TextAssembler, chunks: Chunks, opening: bytes
) -> AsyncGenerator[bytes, None]:
    """The events of an answer. Nothing comes before the engine's first output, and no chunk without text.

    Args:
        opening: the chunk that goes before the first one with text.

    Raises:
        StreamserveError: the request failed before the first event; later on, it is an event.
    """
    events, has_started = opening, False
    try:
        async with aclosing(client.generate(generation)) as deltas:
            async for tokens, finish in deltas:
                text = assembler.accept(tokens, finish)
                if text:
                    events += chunks.text(text)
                if assembler.finish_reason is not None:
                    break
                if events:
                    has_started = True
                    yield events
                    events = b""
    except Exception as error:
        if not has_started:
            raise
        if not isinstance(error, StreamserveError):
            logger.exception("a stream failed")
        yield error_event(problem_of(error))
        return
    assert assembler.finish_reason is not None, "the engine ended a stream without a reason"
    events += chunks.finish(assembler.finish_reason, assembler.stop_reason)
    yield events + chunks.usage(usage_of(generation, assembler)) + DONE


async def first_event(receive: Receive, events: AsyncGenerator[bytes, None]) -> bytes:
    """The first of `events`, which are closed if there is none.

    Until then an error is an ordinary response with a status of its own.

    Raises:
        ClientDisconnect: the client left before.
    """
    try:
        return await until_disconnect(receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
