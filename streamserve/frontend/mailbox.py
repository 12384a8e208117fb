"""The hand-over of one stream's tokens from the pump to the task that writes them out.

It merges: whatever arrives while the task is busy (a slow client, a busy loop) waits as one list and is taken
as one delta. A stream has at most max_tokens tokens, so the list is bounded too.

Waking a task for each token costs more than all that the task does with it, so whoever is in the position to
take what comes at once, without waiting for anything, may listen instead.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import NamedTuple

from streamserve.errors import StreamserveError
from streamserve.messages import Finish, Logprobs

NOT_FINISHED = int(Finish.NONE)
_new_tuple = tuple.__new__


class Delta(NamedTuple):
    """What a stream got since it was last looked at.

    Attributes:
        tokens: new ids, in order; may be empty when `finish` is set.
        finish: a `Finish` code.
        logprobs: a row for each of `tokens` if the request asked for them, else None.
    """

    tokens: list[int]
    finish: int
    logprobs: Logprobs | None = None


class Mailbox:
    """One per stream: the pump puts, one task gets or one listener takes.

    Args:
        stream: the stream's number, `generation << 32 | slot`.
        num_top: how many of the likeliest tokens the request wants to know of at each position; None if it
            did not ask for log probabilities.
        num_prompt_top: the same for its prompt.

    Attributes:
        cached_tokens: prompt tokens that the engine found in its prefix cache.
        began_s: since when the engine runs the request, in monotonic seconds; None while it does not.
        finish: the `Finish` code, once the stream has ended.
        output: all tokens that have ever come, for an engine that goes on from them.
        num_top, num_prompt_top: see above.
        listener: called whenever there is something to take, in the pump's own turn; must not raise. While
            there is one, nobody may `get`.
    """

    __slots__ = (
        "_failure",
        "_logprobs",
        "_prompt_logprobs",
        "_tokens",
        "_waiter",
        "began_s",
        "cached_tokens",
        "finish",
        "listener",
        "num_prompt_top",
        "num_top",
        "output",
        "stream",
    )

    def __init__(self, stream: int, num_top: int | None = None, num_prompt_top: int | None = None) -> None:
        self.stream = stream
        self.num_top = num_top
        self.num_prompt_top = num_prompt_top
        self.cached_tokens = 0
        self.began_s: float | None = None
        self.finish = NOT_FINISHED
        self.output = array("i")
        self.listener: Callable[[], None] | None = None
        self._tokens: list[int] = []
        # Joined only when they are taken.
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[Logprobs] = []
        self._failure: StreamserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, tokens: list[int], finish: int) -> None:
        """Adds tokens and wakes the task. Hot: once a token and stream."""
        self.output.fromlist(tokens)
        if self._tokens:
            self._tokens += tokens
        else:
            self._tokens = tokens
        self.finish = finish
        if self.listener is None:
            self._wake()
        else:
            self.listener()

    def put_logprobs(self, logprobs: Logprobs) -> None:
        """Adds the rows that belong to the tokens of the next `put`."""
        self._logprobs.append(logprobs.rows(slice(None), self.num_top))

    def put_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Adds rows for the next part of the prompt."""
        self._prompt_logprobs.append(logprobs.rows(slice(None), self.num_prompt_top))

    def drop_prompt_logprobs(self) -> None:
        """Forgets them; they will come once more."""
        self._prompt_logprobs.clear()

    @property
    def has_ended(self) -> bool:
        """Nothing more will come."""
        return bool(self.finish) or self._failure is not None

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
        return self.take()

    def take(self) -> Delta:
        """All that has come; may be nothing. Hot: once for each delta.

        Raises:
            StreamserveError: the stream failed and the box is empty.
        """
        if self._failure is not None and not self._tokens and not self.finish:
            raise self._failure
        tokens, self._tokens = self._tokens, []
        logprobs = None if self.num_top is None else self._take_logprobs(self.num_top)
        # As Delta(…), which checks what needs no check here and takes half as long again.
        return _new_tuple(Delta, (tokens, self.finish, logprobs))

    def take_prompt_logprobs(self) -> Logprobs | None:
        """All rows for the prompt, if the request asked for them; complete once there is a token."""
        if self.num_prompt_top is None:
            return None
        pieces, self._prompt_logprobs = self._prompt_logprobs, []
        return Logprobs.join(pieces) if pieces else Logprobs.empty(self.num_prompt_top)

    def _take_logprobs(self, num_top: int) -> Logprobs:
        pieces, self._logprobs = self._logprobs, []
        return Logprobs.join(pieces) if pieces else Logprobs.empty(num_top)

    def _wake(self) -> None:
        if self.listener is not None:
            self.listener()
            return
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

    def open(self, num_top: int | None = None, num_prompt_top: int | None = None) -> Mailbox:
        """A mailbox under a number that no live stream has; for the arguments see `Mailbox`."""
        self._generation = (self._generation + 1) & 0xFFFFFFFF
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self.slots)
            self.slots.append(None)
        mailbox = Mailbox(self._generation << 32 | slot, num_top, num_prompt_top)
        self.slots[slot] = mailbox
        return mailbox

    def find(self, stream: int) -> Mailbox | None:
        """The mailbox of `stream` if it is live."""
        slot = stream & 0xFFFFFFFF
        mailbox = self.slots[slot] if slot < len(self.slots) else None
        return mailbox if mailbox is not None and mailbox.stream == stream else None

    def end(self, mailbox: Mailbox, finish: Finish) -> None:
        """Ends a stream from this side: its task gets what is there and then `finish`, and nothing later."""
        self.slots[mailbox.stream & 0xFFFFFFFF] = None
        mailbox.put([], finish)

    def close(self, mailbox: Mailbox) -> None:
        """Forgets `mailbox` and frees its slot."""
        slot = mailbox.stream & 0xFFFFFFFF
        assert self.slots[slot] in (mailbox, None), f"slot {slot} is not held by {mailbox.stream:#x}"
        self.slots[slot] = None
        self._free.append(slot)

    def fail_all(self, failure: StreamserveError) -> None:
        """Ends every live stream with `failure`."""
        for mailbox in self.slots:
            if mailbox is not None:
                mailbox.fail(failure)

    def __len__(self) -> int:
        return len(self.slots) - len(self._free)
