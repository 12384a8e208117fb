"""Several generations as one sequence of deltas, in the order in which they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from types import TracebackType

from streamserve.frontend.client import EngineClient, Generation
from streamserve.frontend.mailbox import Delta

Arrivals = list[tuple[int, Delta]]


class Merge:
    """Runs generations side by side; leaving its context ends all of them.

    Each has a task, which waits until its last delta was taken before it asks for the next one: what comes
    meanwhile is merged in its mailbox, so a slow caller costs no memory. No task group, because an answer's
    iterator may be advanced by one task and closed by another.

    Args:
        client: the way to the engine.
        generations: one for each choice.
    """

    def __init__(self, client: EngineClient, generations: Sequence[Generation]) -> None:
        self._client = client
        self._generations = generations
        self._tasks: list[asyncio.Task[None]] = []
        self._arrivals: Arrivals = []
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._failure: Exception | None = None

    async def __aenter__(self) -> Merge:
        self._tasks = [
            asyncio.create_task(self._run(index, generation))
            for index, generation in enumerate(self._generations)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self, index: int) -> None:
        """Ends one of them: nobody wants more of it."""
        self._tasks[index].cancel()

    async def take(self) -> Arrivals:
        """What has come since the last time, as soon as there is anything: (which of them, its delta).

        Raises:
            StreamserveError: one of them failed.
        """
        if not self._arrivals and self._failure is None:
            self._arrived.clear()
            await self._arrived.wait()
        if not self._arrivals and self._failure is not None:
            raise self._failure
        arrivals, self._arrivals = self._arrivals, []
        # Wakes those that wait now.
        self._taken.set()
        self._taken.clear()
        return arrivals

    async def _run(self, index: int, generation: Generation) -> None:
        try:
            async with aclosing(self._client.generate(generation)) as deltas:
                async for delta in deltas:
                    self._arrivals.append((index, delta))
                    self._arrived.set()
                    if not delta.finish:
                        await self._taken.wait()
        except Exception as error:
            self._failure = self._failure or error
            self._arrived.set()
