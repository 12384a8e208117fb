"""Which blocks are shared, when, and that it never shows in the output."""

from __future__ import annotations

import pytest
from scheduler_harness import LIMITS, Harness, alone, limits, prompt

from streamserve.sampling import SamplingParams


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49])
@pytest.mark.parametrize("max_tokens", [1, 20])
def test_the_same_prompt_twice(length, max_tokens):
    harness = Harness()
    for _ in range(2):
        harness.add(prompt(length), max_tokens, ignore_eos=True)
        harness.run()
    first, second = harness.streams.values()
    assert first.cached == 0
    # At least one token is computed again, and only whole blocks are shared.
    assert second.cached == (length - 1) // 16 * 16
    assert second.tokens == first.tokens
    harness.check()
    statistics = harness.scheduler.statistics()
    assert statistics.prefix_queries == 2 * length
    assert statistics.prefix_hits == second.cached


@pytest.mark.parametrize("length", [16, 32, 33])
def test_the_same_prompt_twice_in_one_step(length):
    harness = Harness(limits(max_num_batched_tokens=128))
    streams = [harness.add(prompt(length), max_tokens=20, ignore_eos=True) for _ in range(3)]
    harness.step()
    assert len(harness.diffs[0].joins) == 3
    harness.run()
    harness.check()
    # Nothing was findable yet when they joined.
    assert [harness.streams[stream].cached for stream in streams] == [0, 0, 0]
    later = harness.add(prompt(length), max_tokens=1)
    harness.run()
    assert harness.streams[later].cached == (length - 1) // 16 * 16


def test_blocks_are_findable_only_after_the_step_that_computes_them():
    harness = Harness(limits(max_num_batched_tokens=32, max_model_len=128))
    harness.add(prompt(80), max_tokens=30, ignore_eos=True)
    for _ in range(2):
        harness.step()
    # Four blocks are settled; the fifth is computed in the step in which this one joins.
    stream = harness.add(prompt(96), max_tokens=1)
    harness.step()
    assert harness.diffs[-1].joins[0].num_computed == 64
    harness.run()
    assert harness.streams[stream].cached == 64
    harness.check()


def test_a_running_request_shares_its_beginning():
    harness = Harness()
    harness.add(prompt(40), max_tokens=60, ignore_eos=True)
    harness.step()
    free = harness.scheduler.statistics().free_blocks
    stream = harness.add(prompt(36), max_tokens=5, ignore_eos=True)
    harness.step()
    assert harness.diffs[-1].joins[0].num_computed == 32
    assert harness.scheduler.statistics().free_blocks == free - 1
    harness.run()
    harness.check()
    assert harness.streams[stream].cached == 32


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation():
    harness = Harness()
    first = harness.add(prompt(20), max_tokens=40, ignore_eos=True)
    harness.run()
    turn = [*prompt(20), *harness.streams[first].tokens, *prompt(10, seed=9)]
    second = harness.add(turn, max_tokens=3)
    harness.run()
    # 60 tokens, of which the last was never computed: three full blocks.
    assert harness.streams[second].cached == 48
    harness.check()


def test_a_frontend_need_not_hash():
    harness = Harness()
    for stream in (101, 102):
        request = harness.request(prompt(40), SamplingParams(max_tokens=3), stream=stream)
        request.hashes.clear()
        harness.scheduler.add(request)
        while (diff := harness.scheduler.schedule()) is not None:
            harness.scheduler.settle(harness.worker.execute(diff))
    stream = harness.add(prompt(40), max_tokens=3)
    harness.run()
    assert harness.streams[stream].cached == 32


@pytest.mark.parametrize(("seed", "length", "cached"), [(1, 65, 32), (2, 33, 32), (3, 65, 64)])
def test_eviction_takes_the_tail_of_the_longest_unused_first(seed, length, cached):
    harness = Harness(limits(num_blocks=8, max_model_len=128, max_num_batched_tokens=128))
    harness.add(prompt(65, seed=1), max_tokens=1)
    harness.run()
    harness.add(prompt(33, seed=2), max_tokens=1)
    harness.run()
    # 4 + 2 findable blocks are free, and 2 others. The next 4 are those 2 and the last 2 of the first prompt.
    harness.add(prompt(64, seed=3), max_tokens=1)
    harness.run()
    stream = harness.add(prompt(length, seed), max_tokens=1)
    harness.run()
    assert harness.streams[stream].cached == cached
    harness.check()


def test_reset():
    harness = Harness()
    harness.add(prompt(40), max_tokens=30, ignore_eos=True)
    harness.step()
    assert harness.scheduler.reset_prefix_cache()
    harness.scheduler.check_integrity()
    stream = harness.add(prompt(40), max_tokens=3)
    harness.run()
    assert harness.streams[stream].cached == 0
    harness.check()


@pytest.mark.parametrize("in_flight", [False, True])
def test_what_rests_on_blocks_from_before_a_reset_is_never_found(in_flight):
    harness = Harness(limits(max_num_batched_tokens=32))
    stream = harness.add(prompt(80), max_tokens=60, ignore_eos=True)
    if in_flight:
        harness.step(harness.scheduler.reset_prefix_cache)
    else:
        harness.step()
        harness.scheduler.reset_prefix_cache()
    harness.run()
    # A beginning is found by its first block, and so are the blocks behind it: none of them may be there.
    assert len(harness.scheduler._kv.prefix) == 0
    turn = [*prompt(80), *harness.streams[stream].tokens]
    for cached in (0, (len(turn) - 1) // 16 * 16):
        again = harness.add(turn, max_tokens=1)
        harness.run()
        assert harness.streams[again].cached == cached
    harness.check()


def test_the_missing_first_block_does_not_make_the_rest_findable_again():
    harness = Harness(limits(max_num_batched_tokens=48))
    harness.add(prompt(80), max_tokens=60, ignore_eos=True)
    harness.step()
    harness.scheduler.reset_prefix_cache()
    # It computes the beginning with what is true now, while the other goes on from what was true before.
    harness.add(prompt(48), max_tokens=1)
    harness.run()
    stream = harness.add(prompt(80), max_tokens=1)
    harness.run()
    assert harness.streams[stream].cached == 48
    harness.check()


def test_a_request_that_was_preempted_after_a_reset_is_findable_again():
    harness = Harness(limits(num_blocks=4, max_model_len=64))
    streams = [harness.add(prompt(16, seed), max_tokens=40, ignore_eos=True) for seed in range(2)]
    harness.step()
    harness.scheduler.reset_prefix_cache()
    harness.run()
    assert harness.scheduler.statistics().preemptions > 0
    stayed, returned = streams
    for stream, cached in ((returned, 48), (stayed, 0)):
        turn = [*harness.streams[stream].prompt, *harness.streams[stream].tokens]
        again = harness.add(turn, max_tokens=1)
        harness.step()
        assert harness.diffs[-1].joins[0].num_computed == cached
        harness.abort(again)
    harness.run()
    harness.check()


def test_switched_off_nothing_is_hashed_and_nothing_shared(monkeypatch):
    harness = Harness(limits(enable_prefix_caching=False))

    def refuse(*arguments: object) -> bytes:
        raise AssertionError("hashed")

    monkeypatch.setattr(harness.hasher, "extend", refuse)
    for _ in range(2):
        harness.add(prompt(40), max_tokens=30, ignore_eos=True)
        harness.run()
    harness.check()
    assert [stream.cached for stream in harness.streams.values()] == [0, 0]
    statistics = harness.scheduler.statistics()
    assert (statistics.prefix_queries, statistics.prefix_hits) == (0, 0)
    assert not harness.scheduler.reset_prefix_cache()


def test_long_shared_prefix_with_tiny_chunks_gives_the_same_tokens():
    harness = Harness(limits(max_num_batched_tokens=7))
    for length in (100, 90, 100, 33):
        harness.add(prompt(length), max_tokens=10, ignore_eos=True)
    harness.run()
    harness.check()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    assert (
        harness.streams[0].tokens == alone(prompt(100), 100, params, LIMITS)[0] == harness.streams[2].tokens
    )


@pytest.mark.parametrize("length", [5, 40])
def test_different_salts_share_nothing(length):
    # A prompt of 5 tokens has no full block: the first hash of its chain is made in the engine.
    harness = Harness()
    text = prompt(length)
    first = harness.add(text, max_tokens=30, cache_salt="a", ignore_eos=True)
    harness.run()
    turn = [*text, *harness.streams[first].tokens]
    streams = {salt: harness.add(turn, max_tokens=2, cache_salt=salt) for salt in ("b", "", "a")}
    harness.step()
    harness.run()
    cached = {salt: harness.streams[stream].cached for salt, stream in streams.items()}
    assert cached == {"b": 0, "": 0, "a": (len(turn) - 1) // 16 * 16}
    harness.check()
