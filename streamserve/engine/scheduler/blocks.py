"""BlockPool: who may use which KV block.

Every block exists from the start and is only ever a number. The free ones form a doubly linked list threaded
through two arrays, so that taking the next one, giving one back and taking a particular one out of the middle
(a prefix hit) all cost the same, whatever the size of the pool:

        ┌───────────────────── sentinel (index num_blocks) ◄────────────────────┐
        ▼                                                                       │
    next to be given away: nothing to lose │ findable: longest unused ... just given back

Blocks whose content cannot be found go to the front, so that they are spent before anything findable is lost;
findable ones go to the back, and so leave in the order of their last use.
"""

from __future__ import annotations

from array import array

from streamserve.engine.scheduler.prefix import PrefixCache


class BlockPool:
    """Gives out blocks, counts their users, takes them back: O(1) for each block.

    Args:
        num_blocks: blocks there are.
        prefix: knows the findable blocks; told when one is given away and so loses its content.
    """

    def __init__(self, num_blocks: int, prefix: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._prefix = prefix
        # One extra element: the sentinel that closes the ring, so that no operation has a special case.
        self._next = array("i", range(1, num_blocks + 2))
        self._next[num_blocks] = 0
        self._prev = array("i", range(-1, num_blocks))
        self._prev[0] = num_blocks
        self._users = array("i", bytes(4 * num_blocks))

    def allocate(self, count: int) -> list[int]:
        """Gives out the `count` free blocks that are least worth keeping; each has one user now. Hot."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        end, following, users, prefix = self.num_blocks, self._next, self._users, self._prefix
        blocks = []
        block = following[end]
        for _ in range(count):
            blocks.append(block)
            users[block] = 1
            prefix.forget(block)
            block = following[block]
        following[end] = block
        self._prev[block] = end
        self.num_free -= count
        return blocks

    def share(self, block: int) -> None:
        """One more user for a block that can be found, in use or free."""
        if self._users[block] == 0:
            self._unlink(block)
        self._users[block] += 1

    def free(self, block: int) -> None:
        """One user less; without users it is free, and findable until it is given out again. Hot."""
        users = self._users[block] - 1
        assert users >= 0, f"block {block} freed twice"
        self._users[block] = users
        if users == 0:
            end = self.num_blocks
            if self._prefix.holds(block):
                self._link(self._prev[end], block, end)
            else:
                self._link(end, block, self._next[end])

    def num_users(self, block: int) -> int:
        """Requests that use `block`."""
        return self._users[block]

    def free_list(self) -> list[int]:
        """The free blocks, in the order in which they will be given out."""
        blocks: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks and len(blocks) <= self.num_blocks:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def check_integrity(self) -> None:
        """Asserts that the list is whole and that exactly the blocks without users are on it."""
        free = self.free_list()
        assert len(free) == self.num_free, (len(free), self.num_free)
        assert set(free) == {block for block in range(self.num_blocks) if self._users[block] == 0}
        ring = [self.num_blocks, *free]
        for before, block in zip(ring, [*free, self.num_blocks], strict=True):
            assert self._prev[block] == before, (before, block, self._prev[block])

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _link(self, before: int, block: int, after: int) -> None:
        self._prev[block] = before
        self._next[block] = after
        self._next[before] = block
        self._prev[after] = block
        self.num_free += 1
