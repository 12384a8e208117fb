"""The hand-over of one stream's tokens from the pump to the task that writes them out.

It merges: whatever arrives while the task is busy (a slow client, a busy loop) waits as one list and is taken
as one delta. A stream has at most max_tokens tokens, so the list is bounded too.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from streamserve.errors import StreamserveError
from streamserve.messages import Finish

NOT_FINISHED = int(Finish.NONE)


class Delta(NamedTuple):
    """What a stream got since it was last looked at.

    Attributes:
        tokens: new ids, in order; may be empty when `finish` is set.
        finish: a `Finish` code.
    """

    tokens: list[int]
    finish: int


class Mailbox:
    """One per stream: the pump puts, one task gets.

    Attributes:
        stream: the stream's number, `generation << 32 | slot`.
        cached_tokens: prompt tokens that the engine found in its prefix cache.
        finish: the `Finish` code, once the engine has ended the stream.
    """

    __slots__ = ("_failure", "_tokens", "_waiter", "cached_tokens", "finish", "stream")

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.cached_tokens = 0
        self.finish = NOT_FINISHED
        self._tokens: list[int] = []
        self._failure: StreamserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, tokens: list[int], finish: int) -> None:
        """Adds tokens and wakes the task. Hot: once a token and stream."""
        if self._tokens:
            self._tokens += tokens
        else:
            self._tokens = tokens
        self.finish = finish
        self._wake()

    def fail(self, failure: StreamserveError) -> None:
        """Ends the stream with `failure`, after what is already in the box. The first failure counts."""
        if self._failure is None:
            self._failure = failure
            self._wake()

    async def get(self) -> Delta:
        """All that has come, as soon as there is anything.

        Raises:
            StreamserveError: the stream failed and the box is empty.
        """
        if not self._tokens and not self.finish and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None and not self._tokens and not self.finish:
            raise self._failure
        tokens, self._tokens = self._tokens, []
        return Delta(tokens, self.finish)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class StreamTable:
    """The live streams of this frontend, numbered so that routing a delta is a list index.

    Slots are reused, each time under a new generation: a late frame for an earlier stream finds nobody.

    Attributes:
        slots: mailbox by slot, None where it is free. Read by the pump.
    """

    def __init__(self) -> None:
        self.slots: list[Mailbox | None] = []
        self._free: list[int] = []
        self._generation = 0

    def open(self) -> Mailbox:
        """A mailbox under a number that no live stream has."""
        self._generation = (self._generation + 1) & 0xFFFFFFFF
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self.slots)
            self.slots.append(None)
        mailbox = Mailbox(self._generation << 32 | slot)
        self.slots[slot] = mailbox
        return mailbox

    def find(self, stream: int) -> Mailbox | None:
        """The mailbox of `stream` if it is live."""
        slot = stream & 0xFFFFFFFF
        mailbox = self.slots[slot] if slot < len(self.slots) else None
        return mailbox if mailbox is not None and mailbox.stream == stream else None

    def close(self, mailbox: Mailbox) -> None:
        """Forgets `mailbox` and frees its slot."""
        slot = mailbox.stream & 0xFFFFFFFF
        assert self.slots[slot] is mailbox, f"slot {slot} is not held by stream {mailbox.stream:#x}"
        self.slots[slot] = None
        self._free.append(slot)

    def fail_all(self, failure: StreamserveError) -> None:
        """Ends every live stream with `failure`."""
        for mailbox in self.slots:
            if mailbox is not None:
                mailbox.fail(failure)

    def __len__(self) -> int:
        return len(self.slots) - len(self._free)
