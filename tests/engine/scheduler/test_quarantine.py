"""Suspects run alone until they have got some tokens, whatever else runs or waits."""

from __future__ import annotations

import pytest
from scheduler_harness import Harness, limits, prompt

from streamserve.messages import PROBATION_TOKENS

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def running(harness: Harness) -> set[int]:
    """The streams that have a slot."""
    return {request.stream for request in harness.scheduler._table.requests if request is not None}


def companies(harness: Harness, suspects: list[int]) -> list[set[int]]:
    """Runs everything, and tells who ran in each step; no suspect has company before it has its tokens."""
    found: list[set[int]] = []

    def look() -> None:
        company = running(harness)
        found.append(company)
        tried = harness.started if len(company) > 1 else harness.started[:-1]
        for stream in set(tried) & set(suspects):
            got = harness.streams[stream]
            assert len(got.tokens) >= PROBATION_TOKENS or not got.is_live

    while harness.step(look) is not None:
        pass
    harness.check()
    return found


@POLICIES
@DEPTHS
def test_one_after_the_other_and_then_all_together(policy, depth):
    harness = Harness(limits(max_num_seqs=8), policy, depth)
    suspects = [
        harness.add(prompt(9, seed), 30, is_suspect=True, ignore_eos=True, tenant=name)
        for seed, name in enumerate("aba")
    ]
    others = [harness.add(prompt(9, seed), 30, ignore_eos=True) for seed in (5, 6)]
    found = companies(harness, suspects)
    alone = [company for company in found if len(company) == 1]
    # In the steps after its last token of probation others may be waiting for what is still in flight.
    assert harness.started == [*suspects, *others]
    for suspect in suspects:
        assert alone.count({suspect}) >= PROBATION_TOKENS - depth + 1
    first_company = next(at for at, company in enumerate(found) if len(company) > 1)
    assert all(len(company) == 1 for company in found[:first_company])
    assert found[first_company] >= set(suspects)
    assert {*suspects, *others} in found


@DEPTHS
def test_those_that_run_give_way_to_one_that_comes_late(depth):
    harness = Harness(depth=depth)
    others = [harness.add(prompt(9, seed), 40, ignore_eos=True) for seed in range(3)]
    for _ in range(5):
        harness.step()
    suspect = harness.add(prompt(9, 4), 40, is_suspect=True, ignore_eos=True)
    late = harness.add(prompt(9, 5), 5, ignore_eos=True)
    found = companies(harness, [suspect])
    assert {suspect} in found
    begins = found.index({suspect})
    assert found[begins : begins + PROBATION_TOKENS - depth + 1] == [{suspect}] * (
        PROBATION_TOKENS - depth + 1
    )
    assert set(others) <= found[begins + PROBATION_TOKENS + depth]
    assert harness.started[-2:] == [suspect, late]
    assert harness.scheduler.statistics().preemptions >= 3


def test_one_that_ends_or_leaves_on_trial_makes_room_for_the_next():
    harness = Harness()
    first, second, third = (
        harness.add(prompt(9, seed), most, is_suspect=True, ignore_eos=True)
        for seed, most in ((0, 2), (1, 90), (2, 3))
    )
    plain = harness.add(prompt(9, 3), 3, ignore_eos=True)
    for _ in range(3):
        harness.step()
    assert running(harness) == {second}
    harness.abort(second)
    harness.run()
    harness.check()
    assert harness.started == [first, second, third, plain]


def test_one_that_leaves_while_it_waits():
    harness = Harness()
    first = harness.add(prompt(9), 30, is_suspect=True, ignore_eos=True)
    second = harness.add(prompt(9, 1), 30, is_suspect=True, ignore_eos=True)
    harness.step()
    harness.abort(second)
    plain = harness.add(prompt(9, 2), 3, ignore_eos=True)
    harness.run()
    harness.check()
    assert harness.started == [first, plain]


def test_a_long_prompt_is_read_alone():
    harness = Harness(limits(max_num_batched_tokens=16))
    suspect = harness.add(prompt(100), 20, is_suspect=True, ignore_eos=True)
    harness.add(prompt(9, 1), 20, ignore_eos=True)
    found = companies(harness, [suspect])
    assert found[: 7 + PROBATION_TOKENS - 1] == [{suspect}] * (7 + PROBATION_TOKENS - 1)


def test_with_little_memory():
    harness = Harness(limits(num_blocks=8, block_size=4, max_model_len=32))
    others = [harness.add(prompt(8, seed), 16, ignore_eos=True) for seed in range(3)]
    for _ in range(4):
        harness.step()
    suspect = harness.add(prompt(20, 4), 12, is_suspect=True, ignore_eos=True)
    assert {suspect} in companies(harness, [suspect])
    assert len(others) == 3


def test_none_comes_in_while_a_step_of_the_one_before_runs():
    """Or it would be blamed if the engine ended in that step."""
    harness = Harness(depth=2)
    first, second = (harness.add(prompt(9, seed), 40, is_suspect=True, ignore_eos=True) for seed in range(2))
    aborted = False

    def leave() -> None:
        nonlocal aborted
        if not aborted and first in harness.started:
            harness.abort(first)
            aborted = True
            assert harness.scheduler.schedule() is None
            assert second not in harness.started

    harness.step(leave)
    assert aborted
    companies(harness, [second])
