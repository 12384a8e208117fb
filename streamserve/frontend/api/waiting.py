"""Waiting for what takes time, as long as the client does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from typing import Any, NoReturn, TypeVar

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


async def begin(
    receive: Receive, work: Coroutine[Any, Any, Result], patience_s: float
) -> asyncio.Task[Result]:
    """Runs `work`, and waits for it as long as the client does, but not longer than `patience_s`.

    Returns:
        Its task, which has not failed by then; whoever gets it has to `end` it.

    Raises:
        ClientDisconnect: the client left.
        Exception: `work` failed.
    """
    task = asyncio.create_task(work)
    try:
        await until_disconnect(receive, asyncio.wait([task], timeout=patience_s))
        if task.done():
            task.result()
    except BaseException:
        await end(task)
        raise
    return task


async def first_batch(
    receive: Receive, batches: AsyncGenerator[list[bytes], None], patience_s: float
) -> asyncio.Task[list[bytes]]:
    """Begins to get the first of `batches`, which are closed if that fails in time."""

    async def first() -> list[bytes]:
        return await anext(batches)

    try:
        return await begin(receive, first(), patience_s)
    except BaseException:
        await batches.aclose()
        raise


async def end(task: asyncio.Task[Any]) -> None:
    """Returns when nothing of it runs any more. How it ended is nobody's concern."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
