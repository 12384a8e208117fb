"""Too little KV memory: everything still finishes, with the same tokens."""

from __future__ import annotations

import pytest
from scheduler_harness import Harness, limits, prompt

TINY = {"num_blocks": 6, "block_size": 4, "max_model_len": 24, "max_num_batched_tokens": 32}


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_tiny_pool_preempts_and_every_token_is_the_same_as_alone(enable_prefix_caching):
    harness = Harness(limits(**TINY, enable_prefix_caching=enable_prefix_caching))
    for seed in range(8):
        harness.add(prompt(5, seed), max_tokens=15, ignore_eos=True)
    harness.run()
    harness.check()
    assert harness.scheduler.statistics().preemptions > 0


def test_the_latest_gives_way_and_comes_back_first():
    harness = Harness(limits(**TINY))
    streams = [harness.add(prompt(7, seed), max_tokens=14, ignore_eos=True) for seed in range(3)]
    while not harness.scheduler.statistics().preemptions:
        harness.step()
    assert harness.streams[streams[0]].tokens
    left = harness.diffs[-1].leaves.tolist()
    assert len(left) == 1
    finished: list[int] = []
    while (output := harness.step()) is not None:
        finished += output.streams[output.finish != 0].tolist()
    assert finished == streams
    harness.check()


def test_a_preempted_request_finds_what_it_had_computed():
    harness = Harness(limits(**TINY))
    for seed in range(2):
        harness.add(prompt(4, seed), max_tokens=17, ignore_eos=True)
    harness.run()
    harness.check()
    assert harness.scheduler.statistics().preemptions > 0
    joins = [join for diff in harness.diffs for join in diff.joins]
    again = [join for join in joins if len(join.tokens) > join.num_prompt]
    assert any(join.num_computed >= 4 for join in again)
    # Only the first admission counts as a look-up of the prompt.
    assert harness.scheduler.statistics().prefix_queries == 8


def test_the_cached_column_is_given_once():
    # The harness asserts that rows after the first have none; here the second is preempted in between.
    harness = Harness(limits(**TINY))
    harness.add(prompt(9), max_tokens=1)
    harness.run()
    streams = [harness.add(prompt(9), max_tokens=12, ignore_eos=True) for _ in range(2)]
    harness.run()
    harness.check()
    assert [harness.streams[stream].cached for stream in streams] == [8, 8]


def test_preempted_before_its_first_token_it_still_reports_what_was_cached_at_first():
    harness = Harness(
        limits(num_blocks=8, block_size=4, max_model_len=32, max_num_batched_tokens=4), policy="priority"
    )
    harness.add(prompt(9, seed=1), max_tokens=1)
    harness.run()
    slow = harness.add(prompt(24, seed=1), max_tokens=2, priority=1, ignore_eos=True)
    harness.step()
    harness.add(prompt(3, seed=2), max_tokens=25, priority=0, ignore_eos=True)
    harness.run()
    harness.check()
    assert harness.streams[slow].cached == 8


@pytest.mark.parametrize(("policy", "survivor"), [("fcfs", 0), ("priority", 1), ("fair", 0)])
def test_the_least_important_gives_way(policy, survivor):
    """Which is the latest one, unless the operator goes by priorities."""
    harness = Harness(limits(**TINY), policy)
    low = harness.add(prompt(4, 1), max_tokens=18, priority=5, ignore_eos=True)
    high = harness.add(prompt(4, 2), max_tokens=18, priority=-5, ignore_eos=True)
    while not harness.scheduler.statistics().preemptions:
        harness.step()
    harness.step()
    assert harness.scheduler.statistics().running == 1
    streams = [harness.streams[low], harness.streams[high]]
    while not streams[survivor].finish:
        harness.step()
    assert not streams[1 - survivor].finish
    harness.run()
    harness.check()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_siblings_of_one_prompt_with_priorities(policy):
    harness = Harness(limits(**{**TINY, "num_blocks": 10, "max_num_seqs": 16, "max_model_len": 40}), policy)
    for seed in range(4):
        for _ in range(4):
            harness.add(prompt(9, seed), max_tokens=20, ignore_eos=True, priority=0)
    for _ in range(5):
        harness.step()
    harness.add(prompt(9, seed=9), max_tokens=20, ignore_eos=True, priority=-10)
    harness.run()
    harness.check()
    assert harness.scheduler.statistics().preemptions > 0


def test_a_fifth_of_the_memory_is_enough():
    harness = Harness(limits(max_num_seqs=16, num_blocks=16, max_num_batched_tokens=128))
    for seed in range(16):
        harness.add(prompt(20 + seed, seed), max_tokens=60, ignore_eos=True)
    harness.run()
    harness.check()


def test_one_request_that_needs_every_block_among_others():
    harness = Harness(limits(**TINY))
    for seed in range(4):
        harness.add(prompt(3, seed), max_tokens=20, ignore_eos=True)
    big = harness.add(prompt(20, seed=9), max_tokens=4, ignore_eos=True)
    harness.run()
    harness.check()
    assert len(harness.streams[big].tokens) == 4


def test_a_budget_of_one_token_with_memory_for_one_request():
    harness = Harness(limits(**{**TINY, "max_num_batched_tokens": 1}), "priority")
    for priority in (3, 2, 1):
        harness.add(prompt(9, priority), max_tokens=14, ignore_eos=True, priority=priority)
        for _ in range(12):
            harness.step()
    harness.run()
    harness.check()


def test_admission_leaves_running_requests_room_to_grow():
    harness = Harness(limits(**{**TINY, "num_blocks": 8, "max_model_len": 32}))
    harness.add(prompt(15, 1), max_tokens=10, ignore_eos=True)
    harness.step()
    # 4 blocks are taken; 4 are free, but one of them is the first request's to grow into.
    harness.add(prompt(16, 2), max_tokens=3, ignore_eos=True)
    harness.step()
    assert harness.scheduler.statistics().waiting == 1
    harness.run()
    harness.check()
    assert harness.scheduler.statistics().preemptions == 0


def test_a_waiting_request_is_let_in_when_its_beginning_becomes_findable():
    harness = Harness(limits(num_blocks=8, block_size=4, max_model_len=32))
    harness.add(prompt(20), max_tokens=10, ignore_eos=True)
    sharer = harness.add(prompt(20), max_tokens=3, ignore_eos=True)
    harness.step()
    # Alone it would need 5 blocks where 3 are left; sharing 4, it needs one.
    assert harness.scheduler.statistics().waiting == 1
    harness.step()
    assert harness.scheduler.statistics().waiting == 0
    harness.run()
    assert harness.streams[sharer].cached == 16
    harness.check()


def test_nobody_comes_in_with_the_memory_of_who_has_just_given_way():
    harness = Harness(
        limits(
            num_blocks=17,
            block_size=1,
            max_num_seqs=2,
            max_num_batched_tokens=10,
            long_prefill_token_threshold=2,
        ),
        "priority",
    )
    harness.add(prompt(5, 0), max_tokens=7, priority=3, ignore_eos=True)
    for _ in range(4):
        harness.step()
    harness.add(prompt(7, 1), max_tokens=8, priority=1, ignore_eos=True)
    for _ in range(4):
        harness.step()
    harness.add(prompt(8, 2), max_tokens=1, priority=2)
    harness.step()
    assert harness.scheduler.statistics().preemptions == 1
    # It would fit, and three steps later give way in its turn.
    assert not harness.diffs[-1].joins
    harness.run()
    harness.check()
    assert harness.scheduler.statistics().preemptions == 1


def test_a_prefill_under_way_is_promised_the_rest_of_its_blocks():
    harness = Harness(limits(num_blocks=8, block_size=4, max_model_len=32, long_prefill_token_threshold=8))
    harness.add(prompt(24, 1), max_tokens=2, ignore_eos=True)
    harness.step()
    # 6 blocks are free, but 4 of them are for the rest of the prompt, and one to grow into.
    harness.add(prompt(8, 2), max_tokens=2, ignore_eos=True)
    harness.step()
    assert harness.scheduler.statistics().waiting == 1
    harness.run()
    harness.check()
    assert harness.scheduler.statistics().preemptions == 0


def test_after_a_preemption_a_small_and_important_request_still_gets_in():
    harness = Harness(limits(**TINY), "priority")
    harness.add(prompt(4, 1), max_tokens=18, priority=0, ignore_eos=True)
    harness.add(prompt(4, 2), max_tokens=18, priority=5, ignore_eos=True)
    while not harness.scheduler.statistics().preemptions:
        harness.step()
    # From here on the first decodes alone, and every step is the same as the one before.
    harness.step()
    harness.step()
    assert harness.diffs[-1].slots is None
    small = harness.add(prompt(2, 3), max_tokens=1, priority=1)
    harness.step()
    assert harness.streams[small].finish
    harness.run()
    harness.check()


def test_a_request_that_waits_for_memory_is_let_in_when_enough_is_free():
    harness = Harness(limits(num_blocks=12, block_size=4, max_model_len=48))
    short = harness.add(prompt(8, 1), max_tokens=3, ignore_eos=True)
    long = harness.add(prompt(8, 2), max_tokens=30, ignore_eos=True)
    harness.step()
    waits = harness.add(prompt(28, 3), max_tokens=1)
    for _ in range(2):
        harness.step()
        assert harness.scheduler.statistics().waiting == 1
    assert harness.streams[short].finish
    harness.step()
    assert harness.streams[waits].finish
    assert not harness.streams[long].finish
    harness.run()
    harness.check()
