"""KVCache: the blocks of the running requests, and what of them others may share.

Only full blocks are ever shared, and a request writes only behind its shared ones, so nothing is copied on
write.

A reset begins a new generation. K and V rest on all that stands before them, so a request that began in an
older generation has nothing to share, however long it still runs; it is of the new one only when it takes a
slot again, with nothing but what was found or is computed since.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from streamserve.engine.scheduler.blocks import BlockPool
from streamserve.engine.scheduler.limits import SchedulerLimits
from streamserve.engine.scheduler.prefix import PrefixCache
from streamserve.engine.scheduler.states import Request
from streamserve.engine.scheduler.table import Counts, RequestTable, Slots
from streamserve.engine.step import Int32Array
from streamserve.hashing import BlockHasher


class KVCache:
    """Keeps block tables, pool and prefix cache in step.

    Args:
        limits: sizes.
        hasher: hashes the blocks that generated tokens complete.
        table: holds the block tables.

    Attributes:
        generation: how many resets there were.
    """

    def __init__(self, limits: SchedulerLimits, hasher: BlockHasher, table: RequestTable) -> None:
        assert hasher.block_size == limits.block_size, (hasher.block_size, limits.block_size)
        self.prefix = PrefixCache(limits.num_blocks)
        self.pool = BlockPool(limits.num_blocks, self.prefix)
        self.generation = 0
        self.caches_prefixes = limits.enable_prefix_caching
        self._hasher = hasher
        self._block_size = limits.block_size
        self._table = table

    def match(self, request: Request) -> list[int]:
        """The blocks that hold the longest cached beginning of a waiting request.

        What it needs the logits of is left to compute: its last token at least, to sample from.
        """
        return self.prefix.match(request.hashes, self.most_hits(request))

    def most_hits(self, request: Request) -> int:
        """Blocks that a waiting request could take from the cache at best."""
        if not self.caches_prefixes:
            return 0
        return min(len(request.hashes), request.num_reusable // self._block_size)

    def adopt(self, slot: int, blocks: list[int]) -> None:
        """Begins the block table of `slot` with blocks from `match`: their tokens count as computed."""
        for block in blocks:
            self.pool.share(block)
        self._table.add_blocks(slot, blocks)
        self._table.num_computed[slot] = len(blocks) * self._block_size
        self._table.generation[slot] = self.generation

    def grow(self, slot: int, num_blocks: int) -> list[int]:
        """Appends `num_blocks` free blocks to the block table of `slot` and returns them."""
        blocks = self.pool.allocate(num_blocks)
        self._table.add_blocks(slot, blocks)
        return blocks

    def grow_each(self, slots: Slots, num_blocks: Counts) -> tuple[Int32Array, Int32Array]:
        """`grow` for many slots. Returns all blocks, and for each of them the slot that got it. Hot."""
        table = self._table
        rows, indices = _spread(slots, table.capacity[slots] // self._block_size, num_blocks)
        blocks = np.array(self.pool.allocate(len(rows)), dtype=np.int32)
        table.blocks[rows, indices] = blocks
        table.capacity[slots] += num_blocks * self._block_size
        return rows.astype(np.int32), blocks

    def publish(self, slots: Slots, before: Counts, after: Counts) -> None:
        """Makes findable what each slot filled, going from `before` to `after` computed tokens. Hot.

        Slots of an older generation are left out.
        """
        first = before // self._block_size
        num_blocks = after // self._block_size - first
        (full,) = num_blocks.nonzero()
        if not len(full):
            return
        table = self._table
        if self.generation:
            full = full[table.generation[slots[full]] == self.generation]
            if not len(full):
                return
        rows, indices = _spread(slots[full], first[full], num_blocks[full])
        blocks = table.blocks[rows, indices].tolist()
        # One gather for all: each of these slots lives in another corner of the memory.
        tokens = table.token_blocks[rows, indices]
        memory, size = tokens.tobytes(), tokens[0].nbytes
        for row, (slot, index) in enumerate(zip(rows.tolist(), indices.tolist(), strict=True)):
            request = table.requests[slot]
            assert request is not None, f"slot {slot} is free"
            hashes = request.hashes
            if index == len(hashes):
                parent = hashes[-1] if hashes else self._hasher.root(request.cache_salt.encode())
                hashes.append(self._hasher.extend(parent, memory[row * size : (row + 1) * size]))
            self.prefix.insert(hashes[index], blocks[row])

    def reset(self) -> None:
        """Nothing that was computed, or is computed from it later on, can be found any more."""
        self.prefix.clear()
        self.generation += 1

    def release(self, slot: int) -> None:
        """Gives the blocks of `slot` back, last first, so that the beginning stays findable the longest."""
        for block in reversed(self._table.block_row(slot).tolist()):
            self.pool.free(block)
        self._table.capacity[slot] = 0

    def check_integrity(self) -> None:
        """Asserts that every user of a block is a block table, and that the parts are whole."""
        self.pool.check_integrity()
        self.prefix.check_integrity()
        assert (self._table.generation[self._table.order] <= self.generation).all(), self.generation
        users = Counter(
            block for slot in self._table.order.tolist() for block in self._table.block_row(slot).tolist()
        )
        for block in range(self.pool.num_blocks):
            assert self.pool.num_users(block) == users[block], (block, users[block])


def _spread(slots: Slots, first: Counts, counts: Counts) -> tuple[Slots, Counts]:
    """Each slot `counts` times (at least once), beside `first`, `first` + 1, `first` + 2 …"""
    ends = counts.cumsum()
    if ends[-1] == len(slots):
        return slots, first
    rows = slots.repeat(counts)
    return rows, np.arange(len(rows)) + (first - ends + counts).repeat(counts)
