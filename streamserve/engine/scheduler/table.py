"""RequestTable: the running requests as arrays, a row a slot.

What a step reads or writes for every running request is an array here, so that a step of any size is a few
vector operations. Arrays are int64 where they take part in arithmetic or indexing, as NumPy would convert
others each time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamserve.engine.scheduler.limits import SchedulerLimits
from streamserve.engine.scheduler.states import Request
from streamserve.engine.scheduler.stopping import BEYOND, StopRules
from streamserve.engine.step import EMPTY, Int32Array

Slots = npt.NDArray[np.intp]
Counts = npt.NDArray[np.int64]

# No step has this number: what a step brought for a free slot is for nobody.
_NEVER = np.iinfo(np.int64).max


class RequestTable:
    """Slots, who is in them, and what the scheduler knows of each.

    Attributes:
        tokens: int32[max_num_seqs, max_model_len rounded up to blocks], known tokens. What no request has
            reached yet takes no memory.
        token_blocks: the same memory as int32[max_num_seqs, blocks, block_size].
        blocks: int32[max_num_seqs, most blocks of a request], block tables.
        num_tokens: int64, how many tokens are known here or, from a step in flight, to the worker.
        num_computed: int64, how many of them have their K and V in the cache, or will have when the steps in
            flight have run.
        capacity: int64, tokens that the block table has room for; endless for a free slot.
        joined_step: int64, the step in which the request took the slot.
        is_document: bool, whether the request had a document to read when it took the slot.
        generation: int64, of the prefix cache when the request took the slot (see `KVCache`).
        priority: int64, arrival: int64, for choosing whom to preempt.
        stream, frontend: whose the tokens are.
        num_added, num_cached: int64, uint32, see `Request`.
        num_top: int32, how many of the likeliest tokens are to be reported at each position; -1 where no log
            probabilities are.
        requests: the cold record of each, None for a free slot.
        stops: when each of them ends.
        version: changes whenever a request joins or leaves.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        rows = limits.max_num_seqs
        self._limits = limits
        most_blocks = limits.blocks_for(limits.max_model_len)
        self.tokens = np.zeros((rows, most_blocks * limits.block_size), dtype=np.int32)
        self.token_blocks = self.tokens.reshape(rows, most_blocks, limits.block_size)
        self.blocks = np.zeros((rows, most_blocks), dtype=np.int32)
        self.num_tokens = np.zeros(rows, dtype=np.int64)
        self.num_computed = np.zeros(rows, dtype=np.int64)
        self.capacity = np.full(rows, BEYOND, dtype=np.int64)
        self.joined_step = np.full(rows, _NEVER, dtype=np.int64)
        self.is_document = np.zeros(rows, dtype=bool)
        self.generation = np.zeros(rows, dtype=np.int64)
        self.priority = np.zeros(rows, dtype=np.int64)
        self.arrival = np.zeros(rows, dtype=np.int64)
        self.stream = np.zeros(rows, dtype=np.uint64)
        self.frontend = np.zeros(rows, dtype=np.int32)
        self.num_added = np.zeros(rows, dtype=np.int64)
        self.num_cached = np.zeros(rows, dtype=np.uint32)
        self.num_top = np.full(rows, -1, dtype=np.int32)
        self.requests: list[Request | None] = [None] * rows
        self.stops = StopRules(rows, limits.eos_token_ids)
        self.version = 0
        self._free = list(range(rows - 1, -1, -1))
        self._order: Slots = np.zeros(0, dtype=np.intp)
        self._has_gaps = False
        self._leaves: list[int] = []

    @property
    def num_running(self) -> int:
        """Slots that are taken."""
        return len(self.requests) - len(self._free)

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    @property
    def order(self) -> Slots:
        """intp[num_running], the running slots, longest running first."""
        if self._has_gaps:
            self._order = self._order[self.joined_step[self._order] != _NEVER]
            self._has_gaps = False
        return self._order

    def join(self, request: Request, step: int) -> int:
        """Gives `request`, which comes with its tokens and without blocks, a slot from `step` on."""
        order = self.order
        slot = self._free.pop()
        count = len(request.tokens)
        self.tokens[slot, :count] = request.tokens
        self.num_tokens[slot] = count
        self.num_computed[slot] = 0
        self.capacity[slot] = 0
        self.joined_step[slot] = step
        self.priority[slot] = request.priority
        self.arrival[slot] = request.arrival
        self.stream[slot] = request.stream
        self.frontend[slot] = request.frontend
        self.num_added[slot] = request.num_added
        self.num_cached[slot] = request.num_cached or 0
        num_top = request.params.logprobs
        self.num_top[slot] = -1 if num_top is None else num_top
        self.stops.set(slot, request, self._limits.limit(request.num_prompt, request.params.max_tokens))
        self.requests[slot] = request
        request.tokens = EMPTY
        request.slot = slot
        self._order = np.append(order, slot)
        self.version += 1
        return slot

    def leave(self, slot: int) -> Request:
        """Frees `slot`, whose blocks must be back already. The request gets no tokens: see `known_tokens`."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free"
        assert self.capacity[slot] == 0, f"slot {slot} still has blocks"
        request.slot = None
        self.requests[slot] = None
        self.capacity[slot] = BEYOND
        self.joined_step[slot] = _NEVER
        self.stops.clear(slot)
        self._free.append(slot)
        self._leaves.append(slot)
        self._has_gaps = True
        self.version += 1
        return request

    def take_leaves(self) -> Int32Array:
        """The slots given up since the last call, for the worker to hear of."""
        if not self._leaves:
            return EMPTY
        leaves = np.array(self._leaves, dtype=np.int32)
        self._leaves.clear()
        return leaves

    def known_tokens(self, slot: int) -> Int32Array:
        """int32[num_tokens], a copy; only while no step is in flight."""
        return self.tokens[slot, : self.num_tokens[slot]].copy()

    def block_row(self, slot: int) -> Int32Array:
        """int32[n], the block table of `slot`: a view."""
        return self.blocks[slot, : self.capacity[slot] // self._limits.block_size]

    def add_blocks(self, slot: int, blocks: list[int]) -> None:
        """Appends to the block table of `slot`."""
        at, size = int(self.capacity[slot]), self._limits.block_size
        self.blocks[slot, at // size : at // size + len(blocks)] = blocks
        self.capacity[slot] = at + len(blocks) * size

    def cached_if_first(
        self, slots: Slots, positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint32] | None:
        """uint32[n], `num_cached` where the token at `positions` is its first, else 0; None if nowhere."""
        is_first = positions == self.num_added[slots]
        if not is_first.any():
            return None
        return np.where(is_first, self.num_cached[slots], np.uint32(0))

    def present(self, slots: Slots, step: int) -> npt.NDArray[np.bool_]:
        """bool[n], which of `slots` are still held by who held them in `step`."""
        present: npt.NDArray[np.bool_] = self.joined_step[slots] <= step
        return present

    def check_integrity(self) -> None:
        """Asserts that arrays, records and order tell the same story."""
        order = self.order.tolist()
        assert len(order) == len(set(order)) == self.num_running, (order, self._free)
        assert set(order).isdisjoint(self._free), (order, self._free)
        assert len(self._free) == len(set(self._free)), self._free
        for slot, request in enumerate(self.requests):
            if request is None:
                assert self.joined_step[slot] == _NEVER, slot
                assert self.capacity[slot] == BEYOND, slot
            else:
                assert request.slot == slot, (request.slot, slot)
                limit = self._limits.limit(request.num_prompt, request.params.max_tokens)
                assert 0 <= self.num_computed[slot] < self.num_tokens[slot] <= limit, slot
                assert self.num_computed[slot] <= self.capacity[slot], slot
