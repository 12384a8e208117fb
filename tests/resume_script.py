"""An answer that a test steers, and that tells what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

END = object()


class Script:
    """Gives what the test puts into it: batches of bytes, an exception, or the end."""

    is_stream = asks_resume = True

    def __init__(self, answer_id: str = "cmpl-one") -> None:
        self.id = answer_id
        self.num_closed = 0
        self.is_cancelled = False
        self._items: asyncio.Queue[Any] = asyncio.Queue()

    def give(self, *items: Any) -> None:
        for item in items:
            self._items.put_nowait(item)

    def cancel(self) -> None:
        self.is_cancelled = True
        self.give([b"cancelled"], END)

    async def whole(self) -> bytes:
        raise AssertionError("nobody wants it whole")

    async def batches(self) -> AsyncGenerator[list[bytes], None]:
        try:
            while True:
                item = await self._items.get()
                if item is END:
                    return
                if isinstance(item, Exception):
                    raise item
                # Merged, as an answer does.
                batch = list(item)
                yield batch
        finally:
            self.num_closed += 1
