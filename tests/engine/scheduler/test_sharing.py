"""How one step's budget is shared: a long prompt holds nobody up, and loses nothing while it is alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, limits, prompt

from streamserve.engine.scheduler import SchedulerLimits
from streamserve.engine.scheduler.sharing import LEAST_PIECE, share_budget

BUDGET = 512
SIZES = limits(
    max_num_seqs=32, max_num_batched_tokens=BUDGET, num_blocks=8192, max_model_len=8192, block_size=16
)


def text(length: int, seed: int) -> list[int]:
    """A prompt that begins like no other."""
    return [*prompt(4096, seed), *prompt(4096, 1000 + seed)][:length]


def share(harness: Harness, stream: int) -> int:
    """Tokens that `stream` ran in the last step; 0 if it had no slot."""
    slots, counts = harness.worker._slots, harness.worker._counts
    plan = dict(zip(slots, counts, strict=True))
    return sum(
        plan[slot]
        for slot, request in enumerate(harness.scheduler._table.requests)
        if request is not None and request.stream == stream and slot in plan
    )


def steps_to_first_token(harness: Harness, stream: int, most: int) -> int:
    for step in range(1, most + 1):
        harness.step()
        if harness.streams[stream].tokens:
            return step
    raise AssertionError(f"no token after {most} steps")


def test_a_lone_prompt_has_the_whole_budget():
    harness = Harness(SIZES)
    harness.add(text(2048, 1), max_tokens=1)
    harness.run()
    assert [sum(diff.num_tokens) for diff in harness.diffs] == [BUDGET] * 4


def test_a_lone_prompt_beside_decodes_has_all_that_they_leave():
    harness = Harness(SIZES)
    for seed in range(5):
        harness.add(prompt(4, seed), max_tokens=100, ignore_eos=True)
    harness.step()
    long = harness.add(text(2000, 9), max_tokens=1)
    harness.step()
    assert share(harness, long) == BUDGET - 5
    harness.step()
    assert share(harness, long) == BUDGET - 5


@pytest.mark.parametrize("num_long", [1, 2, 3, 10])
@pytest.mark.parametrize("head_start", [0, 1, 3])
def test_a_short_prompt_behind_long_ones_begins_within_three_steps(num_long, head_start):
    harness = Harness(SIZES)
    for seed in range(num_long):
        harness.add(text(8000, seed), max_tokens=4, ignore_eos=True)
    for _ in range(head_start):
        harness.step()
    short = harness.add(prompt(20, 99), max_tokens=4, ignore_eos=True)
    assert steps_to_first_token(harness, short, 3) <= 3


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_one_short_prompt_after_another_begins_at_once_while_a_long_one_is_read(policy):
    harness = Harness(SIZES, policy)
    long = harness.add(text(8000, 1), max_tokens=1)
    harness.step()
    while not harness.streams[long].finish:
        short = harness.add(prompt(20, 100 + len(harness.diffs)), max_tokens=1, tenant="other")
        assert steps_to_first_token(harness, short, 1) == 1
    # Half of each step was for it all the time, so it took twice as long and no more.
    assert len(harness.diffs) <= 2 * 8000 / BUDGET + 2


def test_long_prompts_end_one_after_another_and_use_the_whole_budget():
    harness = Harness(SIZES)
    streams = [harness.add(text(4096, seed), max_tokens=1) for seed in range(4)]
    ended: list[int] = []
    while harness.step() is not None:
        ended += [s for s in streams if harness.streams[s].finish and s not in ended]
    assert ended == streams
    # What the first of them lost to the others, they need not do any more when it is over.
    assert len(harness.diffs) <= 4 * 4096 / BUDGET + 4


def test_of_many_long_prompts_few_are_read_in_a_step():
    harness = Harness(SIZES)
    streams = [harness.add(text(1000, seed), max_tokens=1) for seed in range(30)]
    ended: list[int] = []
    while harness.step() is not None:
        ended += [s for s in streams if harness.streams[s].finish and s not in ended]
        running = [request for request in harness.scheduler._table.requests if request is not None]
        if len(running) == len(streams):
            # Half of the budget for the first of them; four pieces fill the other.
            assert sum(count > 0 for count in harness.worker._counts) <= 1 + 256 // LEAST_PIECE
    assert ended[0] == streams[0]
    assert len(harness.diffs) <= 30 * 1000 / BUDGET + 10


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_no_seat_is_kept_for_who_finds_no_memory(policy: str) -> None:
    """Whoever is first in the queue: here the one before has given up, after each step."""
    harness = Harness(limits(max_num_seqs=8, num_blocks=28, max_model_len=400), policy)
    harness.add(prompt(399, 1), max_tokens=1)
    harness.step()
    waiting = [harness.add(prompt(200, 2 + seed), tenant=str(seed % 3)) for seed in range(6)]
    for stream in waiting:
        harness.step()
        harness.abort(stream)
    counts = [int(diff.num_tokens.sum()) for diff in harness.diffs if diff.num_tokens is not None]
    assert counts == [64] * 6 + [15]


def test_while_two_prompts_are_read_neither_has_more_than_half():
    harness = Harness(SIZES)
    streams = [harness.add(text(2000, seed), max_tokens=1) for seed in range(2)]
    harness.step()
    assert [share(harness, stream) for stream in streams] == [256, 256]
    harness.step()
    assert [share(harness, stream) for stream in streams] == [256, 256]
    harness.run()


def test_nothing_is_kept_for_those_who_could_not_come_in():
    harness = Harness(limits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=256))
    harness.add(prompt(200, 1), max_tokens=1)
    harness.add(prompt(200, 2), max_tokens=1)
    harness.run()
    # All slots are taken.
    assert [sum(diff.num_tokens) for diff in harness.diffs] == [64, 64, 64, 8] * 2

    harness = Harness(limits(num_blocks=16, max_num_batched_tokens=64, max_model_len=256))
    harness.add(prompt(200, 1), max_tokens=1)
    harness.add(prompt(200, 2), max_tokens=1)
    harness.run()
    # Memory is: that is known once the first of the queue has been tried.
    assert [sum(diff.num_tokens) for diff in harness.diffs] == [32, 64, 64, 40, 64, 64, 64, 8]


@settings(max_examples=300, deadline=None)
@given(
    wanted=st.lists(st.sampled_from([1, 1, 2, 5, 40, 100, 8000]), max_size=40),
    extra=st.integers(0, 600),
    keeps_seat=st.booleans(),
)
def test_shares(wanted, extra, keeps_seat):
    budget = len(wanted) + extra
    counts = share_budget(np.array(wanted, dtype=np.int64), budget, keeps_seat=keeps_seat).tolist()
    assert all(0 <= count <= want for count, want in zip(counts, wanted, strict=True))
    assert all(count == 1 for count, want in zip(counts, wanted, strict=True) if want == 1)
    assert sum(counts) <= budget - (keeps_seat and extra > 0)
    reading = [(want, count) for want, count in zip(wanted, counts, strict=True) if want > 1]
    if len(reading) + keeps_seat <= 1:
        assert sum(counts) == min(sum(wanted), budget)
        return
    rest = budget - (len(wanted) - len(reading))
    most = max(1, rest // 2)
    assert all(count <= most for _, count in reading)
    if reading:
        # The longest running one has its half; of the others, who has less to run comes first.
        assert reading[0][1] == min(reading[0][0], most)
        others = sorted(reading[1:], key=lambda pair: (pair[0], -pair[1]))
        # No crumbs: whoever gets less than a piece is the last one who gets anything.
        for (want, count), (_, behind) in itertools.pairwise(others):
            assert count >= min(want, LEAST_PIECE, most) or behind == 0


@st.composite
def sizes(draw) -> SchedulerLimits:
    return limits(
        max_num_seqs=draw(st.integers(1, 12)),
        max_num_batched_tokens=draw(st.integers(1, 48)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3, 20])),
        num_blocks=draw(st.integers(32, 200)),
        block_size=4,
        max_model_len=128,
    )


@settings(max_examples=150, deadline=None)
@given(
    bounds=sizes(),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    crowd=st.lists(
        st.tuples(st.integers(1, 100), st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=14
    ),
)
def test_shares_of_any_crowd(bounds, policy, crowd):
    """Nobody crowds out the others, and who waits for room in the budget alone does not wait in vain."""
    harness = Harness(bounds, policy)
    budget = bounds.max_num_batched_tokens
    for seed, (num_prompt, max_tokens, pause) in enumerate(crowd):
        harness.add(prompt(num_prompt, seed), max_tokens=max_tokens, ignore_eos=True)
        for _ in range(pause):
            harness.step()
            check_step(harness, budget)
    while harness.scheduler.has_work:
        harness.step()
        check_step(harness, budget)
    harness.check()


def check_step(harness: Harness, budget: int) -> None:
    """The worker checks that every answer goes on and that the budget is kept; this looks at the shares."""
    if not harness.scheduler.has_work:
        return
    counts = harness.worker._counts
    assert sum(counts) <= budget
    num_reading = sum(count > 1 for count in counts)
    if num_reading > 1:
        assert max(counts) <= -(-budget // 2)


def test_no_count_is_below_nothing():
    """A document that was cut to one token looks like a request that decodes."""
    counts = share_budget(np.array([199, 1, 1, 1, 1]), 3, keeps_seat=False)
    assert counts.min() == 0
