"""Fair shares, through the whole scheduler: a flood of requests takes nobody's turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, limits, prompt

from streamserve.engine.scheduler.policy import OUTPUT_TOKEN_WEIGHT, PROMPT_TOKEN_WEIGHT

SIZES = {"max_num_seqs": 4, "num_blocks": 64, "block_size": 4, "max_model_len": 64}


def served(harness: Harness, streams: list[int]) -> int:
    """Weighted tokens that these streams were served."""
    weighted = 0
    for number in streams:
        stream = harness.streams[number]
        weighted += PROMPT_TOKEN_WEIGHT * len(stream.prompt) * (number in harness.started)
        weighted += OUTPUT_TOKEN_WEIGHT * len(stream.tokens)
    return weighted


def add(harness: Harness, tenant: str, num_prompt: int, max_tokens: int, seed: int) -> int:
    return harness.add(prompt(num_prompt, seed), max_tokens=max_tokens, tenant=tenant, ignore_eos=True)


@pytest.mark.parametrize(("policy", "num_before"), [("fcfs", 40), ("fair", 4)])
def test_a_light_tenant_does_not_wait_behind_a_flood(policy, num_before):
    harness = Harness(limits(**SIZES), policy)
    for seed in range(40):
        add(harness, "flood", 8, 8, seed)
    harness.step()
    light = add(harness, "light", 8, 8, 99)
    while light not in harness.started:
        harness.step()
    # Those that had a slot when it came are not stopped for it.
    assert harness.started.index(light) == num_before
    harness.run()
    harness.check()


def test_each_request_of_a_light_tenant_is_next():
    harness = Harness(limits(**SIZES), "fair")
    for seed in range(60):
        add(harness, "flood", 8, 8, seed)
    for turn in range(5):
        light = add(harness, "light", 8, 4, 100 + turn)
        num_started = len(harness.started)
        while not harness.streams[light].finish:
            harness.step()
        # It is never behind more of the flood than fill the slots once.
        assert harness.started.index(light) - num_started < SIZES["max_num_seqs"]
    harness.run()
    harness.check()


def test_without_tenants_it_is_first_come_first_served():
    harness = Harness(limits(**SIZES), "fair")
    streams = [add(harness, "", 8, 4, seed) for seed in range(20)]
    harness.run()
    assert harness.started == streams


def test_tokens_from_the_cache_are_not_charged():
    harness = Harness(limits(**SIZES), "fair")
    queue = harness.scheduler._queue._inner
    harness.add(prompt(41), max_tokens=1, tenant="a")
    harness.run()
    assert queue.counter("a") == 41 + OUTPUT_TOKEN_WEIGHT
    harness.add(prompt(41), max_tokens=1, tenant="a")
    harness.run()
    assert queue.counter("a") == 41 + 1 + 2 * OUTPUT_TOKEN_WEIGHT


def test_what_is_computed_again_after_a_preemption_is_not_charged_again():
    harness = Harness(limits(num_blocks=6, block_size=4, max_model_len=24, max_num_batched_tokens=32), "fair")
    for seed in range(8):
        add(harness, "a", 5, 15, seed)
    harness.run()
    assert harness.scheduler.statistics().preemptions > 0
    assert harness.scheduler._queue._inner.counter("a") == 8 * (5 + 15 * OUTPUT_TOKEN_WEIGHT)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=3),
    num_steps=st.integers(10, 60),
    num_blocks=st.integers(16, 40),
)
def test_shares_of_tenants_that_keep_waiting_stay_close(sizes, num_steps, num_blocks):
    """Each tenant always has requests waiting, of sizes of its own: none gets ahead of another for long."""
    bounds = limits(**{**SIZES, "num_blocks": num_blocks, "enable_prefix_caching": False})
    harness = Harness(bounds, "fair")
    streams: list[list[int]] = [[] for _ in sizes]
    for step in range(num_steps):
        for tenant, (num_prompt, max_tokens) in enumerate(sizes):
            waiting = sum(number not in harness.started for number in streams[tenant])
            for _ in range(bounds.max_num_seqs + 1 - waiting):
                seed = 1000 * tenant + step
                streams[tenant].append(add(harness, str(tenant), num_prompt, max_tokens, seed))
        harness.step()
        shares = [served(harness, numbers) for numbers in streams]
        # What can be in the cache, and be charged only after it was let in.
        most_tokens = min(num_blocks * SIZES["block_size"], bounds.max_num_seqs * 20)
        longest = max(num_prompt for num_prompt, _ in sizes)
        bound = 2 * max(PROMPT_TOKEN_WEIGHT * longest, OUTPUT_TOKEN_WEIGHT * most_tokens)
        assert max(shares) - min(shares) <= bound, shares
    harness.run()
    harness.check()


@settings(max_examples=40, deadline=None)
@given(
    light=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 12)), max_size=6),
    flood=st.integers(10, 40),
)
def test_nobody_starves(light, flood):
    """Whenever a request of the light tenant comes, it waits for as many steps as the running ones take."""
    harness = Harness(limits(**SIZES), "fair")
    for seed in range(flood):
        add(harness, "flood", 8, 12, seed)
    for seed, (num_prompt, max_tokens, pause) in enumerate(light):
        number = add(harness, "light", num_prompt, max_tokens, 500 + seed)
        steps = 0
        while number not in harness.started:
            harness.step()
            steps += 1
            assert steps <= 2 * 12 + 2
        for _ in range(pause):
            harness.step()
    harness.run()
    harness.check()
