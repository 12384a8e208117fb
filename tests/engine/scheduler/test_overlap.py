"""Steps that are scheduled before the ones ahead of them are settled."""

from __future__ import annotations

import pytest
from scheduler_harness import EOS, Harness, limits, prompt

from streamserve.messages import Finish

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def in_flight(harness):
    return len(harness._in_flight)


@DEPTHS
def test_a_step_is_scheduled_while_others_are_in_flight(depth):
    harness = Harness(depth=depth)
    harness.add(prompt(5), max_tokens=20, ignore_eos=True)
    seen = []
    harness.step(in_flight=lambda: seen.append(in_flight(harness)))
    harness.step(in_flight=lambda: seen.append(in_flight(harness)))
    assert seen == [depth, depth]


@DEPTHS
def test_what_ends_by_its_length_costs_no_extra_step(depth):
    harness = Harness(depth=depth)
    harness.add(prompt(5), max_tokens=7, ignore_eos=True)
    harness.run()
    harness.check()
    assert len(harness.diffs) == 7


@DEPTHS
def test_what_a_stop_token_ends_runs_until_that_is_known(depth):
    harness = Harness(depth=depth)
    # In the harness a token follows from those before it: this seed comes to an end by itself.
    seed = next(seed for seed in range(100) if 2 <= tokens_until_eos(seed) < 15)
    stopping = harness.add(prompt(5, seed=seed), max_tokens=30)
    harness.run()
    harness.check()
    stream = harness.streams[stopping]
    assert stream.finish is Finish.STOP
    assert stream.tokens[-1] == EOS
    assert len(harness.diffs) == len(stream.tokens) + depth - 1


def tokens_until_eos(seed):
    harness = Harness()
    stream = harness.add(prompt(5, seed=seed), max_tokens=30)
    harness.run()
    tokens = harness.streams[stream].tokens
    return len(tokens) if tokens[-1] == EOS else 0


@DEPTHS
def test_steady_steps_say_nothing(depth):
    harness = Harness(depth=depth)
    for seed in range(3):
        harness.add(prompt(5, seed=seed), max_tokens=30, ignore_eos=True)
    harness.run()
    harness.check()
    assert sum(diff.slots is None for diff in harness.diffs) >= 25


def test_memory_that_is_short_waits_for_what_is_in_flight():
    # Both grow into their last blocks at once; the first ends with what is in flight, so nobody gives way.
    harness = Harness(
        limits(num_blocks=4, block_size=4, max_model_len=16, enable_prefix_caching=False), depth=2
    )
    harness.add(prompt(4, seed=1), max_tokens=5, ignore_eos=True)
    harness.add(prompt(4, seed=2), max_tokens=9, ignore_eos=True)
    harness.run()
    harness.check()
    assert harness.scheduler.statistics().preemptions == 0


@DEPTHS
def test_memory_for_a_part_is_enough_for_all(depth):
    harness = Harness(limits(num_blocks=7, block_size=4, max_model_len=28), depth=depth)
    for seed in range(5):
        harness.add(prompt(6, seed=seed), max_tokens=20, ignore_eos=True)
    harness.run()
    harness.check()
    assert harness.scheduler.statistics().preemptions > 0


def test_who_takes_the_slot_of_one_that_is_aborted_in_flight_gets_its_own_tokens():
    harness = Harness(limits(max_num_seqs=1), depth=2)
    gone = harness.add(prompt(5), max_tokens=20, ignore_eos=True)
    harness.step()
    harness.add(prompt(3, seed=1), max_tokens=5)
    harness.step(in_flight=lambda: harness.abort(gone))
    harness.run()
    harness.check()
