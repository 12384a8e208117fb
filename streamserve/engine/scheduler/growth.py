"""Growth: running requests get the blocks for their next tokens, at others' cost when memory is short."""

from __future__ import annotations

import numpy as np

from streamserve.engine.scheduler.kv_cache import KVCache
from streamserve.engine.scheduler.limits import SchedulerLimits
from streamserve.engine.scheduler.policy import RequestQueue
from streamserve.engine.scheduler.states import State
from streamserve.engine.scheduler.table import Counts, RequestTable, Slots
from streamserve.engine.step import EMPTY, Int32Array


class Growth:
    """Appends to block tables and preempts.

    Attributes:
        append_slots, append_blocks: what the last `grow` or `grow_decodes` appended, for the worker.
        was_short: whether the last `grow` could not give all that was asked for.
        num_preemptions: requests preempted so far.
    """

    def __init__(
        self, limits: SchedulerLimits, table: RequestTable, kv: KVCache, queue: RequestQueue
    ) -> None:
        self.append_slots: Int32Array = EMPTY
        self.append_blocks: Int32Array = EMPTY
        self.was_short = False
        self.num_preemptions = 0
        self._limits = limits
        self._table = table
        self._kv = kv
        self._queue = queue

    def grow_decodes(self) -> bool:
        """Gives a block to every running request whose last one is full. Hot.

        For steps in which every running request runs one token. False, and nothing given, if memory is short.
        """
        (full,) = (self._table.num_computed == self._table.capacity).nonzero()
        if len(full) > self._kv.pool.num_free:
            return False
        self.was_short = False
        self._give(full, np.ones(len(full), dtype=np.int64))
        return True

    def grow(self, slots: Slots, counts: Counts, *, may_preempt: bool) -> tuple[Slots, Counts] | None:
        """Makes room for `counts[i]` more tokens of `slots[i]`, in the order of `RequestTable.order`.

        Returns the slots that are left and how many tokens each of them can run: when memory is short, some
        have been preempted, and some can run less than asked for. If that may not be, None, and nothing has
        changed.

        Args:
            slots: the running requests that run; all of them if `may_preempt`.
            counts: tokens of each.
            may_preempt: no step is in flight.
        """
        lacking = self._table.num_computed[slots] + counts - self._table.capacity[slots]
        growing = np.flatnonzero(lacking > 0)
        num_blocks = -(-lacking[growing] // self._limits.block_size)
        self.was_short = bool(num_blocks.sum() > self._kv.pool.num_free)
        if self.was_short:
            return self._share_out(slots, counts) if may_preempt else None
        self._give(slots[growing], num_blocks)
        return slots, counts

    def preempt_all(self) -> None:
        """All running requests give way; no step may be in flight."""
        for slot in reversed(self._table.order.tolist()):
            self._preempt(slot)

    def _give(self, slots: Slots, num_blocks: Counts) -> None:
        if len(slots):
            self.append_slots, self.append_blocks = self._kv.grow_each(slots, num_blocks)
        else:
            self.append_slots = self.append_blocks = EMPTY

    def _share_out(self, slots: Slots, counts: Counts) -> tuple[Slots, Counts]:
        """There is not enough for all. The most important request is served first, and the least gives way.

        The most important one gives way to nobody and, alone, always fits; so every step makes progress.
        """
        table, size = self._table, self._limits.block_size
        wanted = dict(zip(slots.tolist(), counts.tolist(), strict=True))
        given: list[tuple[int, int]] = []
        ranked = slots[np.lexsort((table.arrival[slots], table.priority[slots]))].tolist()
        served = 0
        while served < len(ranked):
            slot = ranked[served]
            if not wanted[slot]:
                served += 1
                continue
            room = int(table.capacity[slot] - table.num_computed[slot])
            reach = room + self._kv.pool.num_free * size
            if not reach:
                self._preempt(ranked.pop())
                continue
            wanted[slot] = min(wanted[slot], reach)
            num_blocks = self._limits.blocks_for(max(wanted[slot] - room, 0))
            given += [(slot, block) for block in self._kv.grow(slot, num_blocks)]
            served += 1
        self.append_slots = np.array([slot for slot, _ in given], dtype=np.int32)
        self.append_blocks = np.array([block for _, block in given], dtype=np.int32)
        left = table.order
        return left, np.array([wanted[slot] for slot in left.tolist()], dtype=np.int64)

    def _preempt(self, slot: int) -> None:
        """The request gives back all but its tokens; what it had computed can still be found for a while."""
        tokens = self._table.known_tokens(slot)
        self._kv.release(slot)
        self._queue.left(slot)
        request = self._table.leave(slot)
        request.tokens = tokens
        request.move(State.PREEMPTED)
        self._queue.restore(request)
        self.num_preemptions += 1
