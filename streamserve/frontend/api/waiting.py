"""Waiting for what takes time, as long as the client does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import NoReturn, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


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


async def first_batch(receive: Receive, batches: AsyncGenerator[list[bytes], None]) -> list[bytes]:
    """The first of `batches`, which are closed if there is none.

    Raises:
        ClientDisconnect: the client left before.
    """
    try:
        return await until_disconnect(receive, anext(batches))
    except BaseException:
        await batches.aclose()
        raise
