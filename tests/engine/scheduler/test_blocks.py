"""BlockPool and PrefixCache against plain lists and dicts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamserve.engine.scheduler.blocks import BlockPool
from streamserve.engine.scheduler.prefix import PrefixCache


def make_pool(num_blocks: int) -> tuple[BlockPool, PrefixCache]:
    prefix = PrefixCache(num_blocks)
    return BlockPool(num_blocks, prefix), prefix


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


class PoolMachine(RuleBasedStateMachine):
    """`free` is the order in which blocks go out; `found` and `names` are the two directions of the cache."""

    @initialize(num_blocks=st.integers(min_value=1, max_value=9))
    def make(self, num_blocks):
        self.pool, self.prefix = make_pool(num_blocks)
        self.free = list(range(num_blocks))
        self.users: dict[int, int] = {}
        self.found: dict[bytes, int] = {}

    def hash_of(self, block: int) -> bytes | None:
        return next((key for key, holder in self.found.items() if holder == block), None)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(1, len(self.free)))
        blocks = self.pool.allocate(count)
        assert blocks == self.free[:count]
        del self.free[:count]
        for block in blocks:
            self.users[block] = 1
            self.found.pop(self.hash_of(block), None)

    @rule()
    def allocate_too_many(self):
        with pytest.raises(AssertionError, match="blocks wanted"):
            self.pool.allocate(len(self.free) + 1)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data):
        block = data.draw(st.sampled_from(sorted(self.users)))
        self.pool.free(block)
        self.users[block] -= 1
        if self.users[block] == 0:
            del self.users[block]
            self.free.insert(len(self.free) if self.hash_of(block) else 0, block)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def release_twice(self, data):
        with pytest.raises(AssertionError, match="freed twice"):
            self.pool.free(data.draw(st.sampled_from(self.free)))

    @precondition(lambda self: self.users)
    @rule(data=st.data(), number=st.integers(min_value=0, max_value=12))
    def publish(self, data, number):
        block = data.draw(st.sampled_from(sorted(self.users)))
        if self.hash_of(block) is None:
            is_new = name(number) not in self.found
            assert self.prefix.insert(name(number), block) == is_new
            if is_new:
                self.found[name(number)] = block

    @rule(numbers=st.lists(st.integers(min_value=0, max_value=12), max_size=4), most=st.integers(0, 4))
    def match_and_share(self, numbers, most):
        hashes = [name(number) for number in numbers]
        expected: list[int] = []
        for key in hashes[:most]:
            if key not in self.found:
                break
            expected.append(self.found[key])
        assert self.prefix.match(hashes, most) == expected
        for block in set(expected):
            self.pool.share(block)
            self.users[block] = self.users.get(block, 0) + 1
            if block in self.free:
                self.free.remove(block)

    @rule()
    def clear(self):
        self.prefix.clear()
        self.found.clear()

    @invariant()
    def agrees(self):
        self.pool.check_integrity()
        self.prefix.check_integrity()
        assert self.pool.free_list() == self.free
        assert self.pool.num_free == len(self.free)
        assert len(self.prefix) == len(self.found)
        for block in range(self.pool.num_blocks):
            assert self.pool.num_users(block) == self.users.get(block, 0)
            assert self.prefix.holds(block) == (self.hash_of(block) is not None)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_free_blocks_stay_findable_until_they_are_given_out_in_order_of_last_use():
    pool, prefix = make_pool(4)
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        prefix.insert(name(block), block)
    for block in (blocks[1], blocks[3], blocks[0], blocks[2]):
        pool.free(block)
    assert len(prefix) == 3
    # What cannot be found goes first, then the longest unused.
    assert pool.allocate(2) == [blocks[3], blocks[1]]
    assert name(blocks[1]) not in prefix
    assert name(blocks[0]) in prefix


def test_using_a_free_block_again_renews_it():
    pool, prefix = make_pool(2)
    blocks = pool.allocate(2)
    for block in blocks:
        prefix.insert(name(block), block)
    for block in blocks:
        pool.free(block)
    pool.share(blocks[0])
    assert pool.num_free == 1
    pool.free(blocks[0])
    assert pool.free_list() == [blocks[1], blocks[0]]


def test_a_block_holds_one_content():
    pool, prefix = make_pool(1)
    (block,) = pool.allocate(1)
    assert prefix.insert(name(1), block)
    with pytest.raises(AssertionError, match="block 0 holds"):
        prefix.insert(name(2), block)
