"""Log probabilities on their way through the scheduler; the harness checks each row of them."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import Harness, limits, prompt

from streamserve.engine.step import StepResult

TINY = {"num_blocks": 6, "block_size": 4, "max_model_len": 24, "max_num_batched_tokens": 32}


def test_only_those_that_asked_have_rows():
    harness = Harness()
    harness.add(prompt(5, 1), max_tokens=6, ignore_eos=True)
    three = harness.add(prompt(5, 2), max_tokens=6, ignore_eos=True, logprobs=3)
    none = harness.add(prompt(5, 3), max_tokens=6, ignore_eos=True, logprobs=0)
    output = harness.step()
    assert output.num_top.tolist() == [-1, 3, 0]
    assert output.logprobs.top.shape == (3, 3)
    harness.run()
    harness.check()
    assert len(harness.streams[three].tokens) == len(harness.streams[none].tokens) == 6


def test_nobody_asked():
    harness = Harness()
    harness.add(prompt(5), max_tokens=3, ignore_eos=True)
    while (output := harness.step()) is not None:
        assert output.logprobs is None
        assert output.num_top is None
        assert output.prompt_logprobs == ()


def test_rows_of_a_request_aborted_in_flight_are_dropped():
    harness = Harness()
    streams = [harness.add(prompt(5, seed), max_tokens=6, ignore_eos=True, logprobs=2) for seed in range(3)]
    harness.step()
    output = harness.step(lambda: harness.abort(streams[1]))
    assert output.streams.tolist() == [streams[0], streams[2]]
    assert len(output.logprobs.chosen) == 2
    harness.run()
    harness.check()


def test_a_prompt_in_chunks_is_reported_in_parts_before_its_first_token():
    harness = Harness(limits(max_num_batched_tokens=24))
    stream = harness.add(prompt(60), max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    parts = []
    while (output := harness.step()) is not None:
        parts += [
            (part.start, len(part.logprobs.chosen), len(output.streams)) for part in output.prompt_logprobs
        ]
    # The last row of a chunk predicts the first token of the next.
    assert parts == [(1, 24, 0), (25, 24, 0), (49, 11, 1)]
    assert harness.streams[stream].num_prompt_rows == 59


def test_a_prompt_of_one_token_has_no_rows():
    harness = Harness()
    harness.add(prompt(1), max_tokens=2, prompt_logprobs=2)
    output = harness.step()
    assert output.prompt_logprobs == ()
    harness.run()
    harness.check()


def test_what_the_cache_holds_is_computed_all_the_same_and_shared_with_others():
    harness = Harness()
    first = harness.add(prompt(40), max_tokens=1, prompt_logprobs=0)
    harness.run()
    again = harness.add(prompt(40), max_tokens=1, prompt_logprobs=0)
    harness.run()
    other = harness.add(prompt(40), max_tokens=1)
    harness.run()
    assert harness.streams[first].num_prompt_rows == harness.streams[again].num_prompt_rows == 39
    assert [harness.streams[stream].cached for stream in (first, again, other)] == [0, 0, 32]
    statistics = harness.scheduler.statistics()
    assert (statistics.prefix_queries, statistics.prefix_hits) == (40, 32)


@pytest.mark.parametrize("num_prompt", [4, 7, 8])
def test_no_position_is_reported_twice_after_a_preemption(num_prompt):
    harness = Harness(limits(**TINY))
    for seed in range(3):
        harness.add(prompt(num_prompt, seed), max_tokens=14, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    harness.run()
    harness.check()
    assert harness.scheduler.statistics().preemptions > 0


def test_once_reported_a_prompt_need_not_be_computed_again():
    harness = Harness(limits(**TINY))
    for seed in range(2):
        harness.add(prompt(4, seed), max_tokens=17, prompt_logprobs=1, ignore_eos=True)
    harness.run()
    harness.check()
    joins = [join for diff in harness.diffs for join in diff.joins if len(join.tokens) > join.num_prompt]
    assert any(join.num_computed >= 4 for join in joins)


def test_preempted_in_the_middle_of_its_prompt_it_goes_on_where_reports_ended():
    harness = Harness(
        limits(num_blocks=8, block_size=4, max_model_len=32, long_prefill_token_threshold=2), "priority"
    )
    slow = harness.add(prompt(24, seed=1), max_tokens=2, priority=1, ignore_eos=True, prompt_logprobs=2)
    harness.step()
    harness.add(prompt(3, seed=2), max_tokens=25, priority=0, ignore_eos=True)
    for _ in range(12):
        harness.step()
    assert harness.scheduler.statistics().preemptions > 0
    assert 0 < harness.streams[slow].num_prompt_rows < 23
    harness.run()
    harness.check()
    assert harness.streams[slow].num_prompt_rows == 23


def test_rows_of_a_slot_that_somebody_else_has_by_now_are_for_nobody():
    harness = Harness(limits(max_num_seqs=1))
    old = harness.add(prompt(6), max_tokens=4, prompt_logprobs=1, logprobs=1)
    scheduler = harness.scheduler
    result = harness.worker.execute(scheduler.schedule())
    harness.abort(old)
    output = scheduler.settle(result)
    assert output.prompt_logprobs == []
    assert not len(output.streams)
    assert not len(output.logprobs.chosen)


def test_a_worker_that_leaves_a_position_out_is_found_out():
    harness = Harness()
    harness.add(prompt(6), max_tokens=4, prompt_logprobs=1)
    result = harness.worker.execute(harness.scheduler.schedule())
    (part,) = result.prompt_logprobs
    late = type(part)(part.slot, 2, part.logprobs.rows(slice(1, None)))
    broken = StepResult(result.step, result.slots, result.token_ids, prompt_logprobs=[late])
    with pytest.raises(AssertionError):
        harness.scheduler.settle(broken)


def test_wider_rows_than_asked_for_are_cut():
    harness = Harness()
    harness.add(prompt(6), max_tokens=1, prompt_logprobs=1)
    result = harness.worker.execute(harness.scheduler.schedule())
    (part,) = result.prompt_logprobs
    logprobs = part.logprobs
    wide = type(logprobs)(logprobs.chosen, np.tile(logprobs.top_ids, 3), np.tile(logprobs.top, 3))
    again = StepResult(result.step, result.slots, result.token_ids, None, [type(part)(part.slot, 1, wide)])
    (rows,) = harness.scheduler.settle(again).prompt_logprobs
    assert rows.logprobs.top.shape == (5, 1)
