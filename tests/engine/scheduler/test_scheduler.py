"""The scheduler by example: budget, chunks, limits, stops, aborts, O(Δ)."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import EOS, LIMITS, VOCAB, Harness, alone, limits, prompt

from streamserve.engine.scheduler import Scheduler
from streamserve.engine.scheduler.states import State
from streamserve.engine.step import StepDiff, StepResult
from streamserve.errors import RequestFailed
from streamserve.hashing import BlockHasher
from streamserve.messages import Finish
from streamserve.sampling import SamplingParams


def plan(diff: StepDiff) -> dict[int, int]:
    assert diff.slots is not None
    assert diff.num_tokens is not None
    return dict(zip(diff.slots.tolist(), diff.num_tokens.tolist(), strict=True))


def result(diff: StepDiff, slots: list[int], tokens: list[int]) -> StepResult:
    return StepResult(diff.step, np.array(slots, dtype=np.int32), np.array(tokens, dtype=np.int32))


def test_one_request_from_beginning_to_end():
    harness = Harness()
    stream = harness.add(prompt(20), max_tokens=5, ignore_eos=True)
    harness.run()
    harness.check()
    assert len(harness.streams[stream].tokens) == 5
    assert harness.streams[stream].finish is Finish.LENGTH
    assert harness.streams[stream].cached == 0
    assert len(harness.diffs) == 5


def test_nothing_to_do():
    harness = Harness()
    assert not harness.scheduler.has_work
    assert harness.scheduler.schedule() is None
    assert harness.scheduler.schedule() is None


def test_a_long_prompt_runs_in_chunks_and_has_no_row_before_its_end():
    harness = Harness(limits(max_num_batched_tokens=24))
    harness.add(prompt(60), max_tokens=2, ignore_eos=True)
    rows = []
    while (output := harness.step()) is not None:
        rows.append(len(output.streams))
    assert [sum(plan(diff).values()) for diff in harness.diffs] == [24, 24, 12, 1]
    assert rows == [0, 0, 1, 1]
    harness.check()


def test_the_threshold_caps_one_request_and_leaves_room_for_others():
    harness = Harness(limits(long_prefill_token_threshold=10))
    harness.add(prompt(60, seed=1), max_tokens=1)
    harness.add(prompt(5, seed=2), max_tokens=1)
    harness.step()
    assert sorted(plan(harness.diffs[0]).values()) == [5, 10]
    harness.run()
    harness.check()


def test_decodes_go_on_while_a_long_prompt_is_computed():
    harness = Harness(limits(max_num_batched_tokens=20))
    short = harness.add(prompt(4, seed=1), max_tokens=40, ignore_eos=True)
    harness.step()
    harness.add(prompt(200, seed=2), max_tokens=1)
    for _ in range(10):
        before = len(harness.streams[short].tokens)
        harness.step()
        assert len(harness.streams[short].tokens) == before + 1
        assert sorted(plan(harness.diffs[-1]).values()) == [1, 19]
    harness.run()
    harness.check()


def test_first_come_first_served():
    harness = Harness(limits(max_num_seqs=2))
    streams = [harness.add(prompt(9, seed), max_tokens=3, ignore_eos=True) for seed in range(6)]
    started: list[int] = []
    while (output := harness.step()) is not None:
        started += [stream for stream in output.streams.tolist() if stream not in started]
    assert started == streams
    harness.check()


def test_a_big_request_at_the_head_is_not_overtaken():
    harness = Harness(limits(num_blocks=8, max_model_len=128))
    harness.add(prompt(64, seed=1), max_tokens=10, ignore_eos=True)
    harness.step()
    big = harness.add(prompt(100, seed=2), max_tokens=10, ignore_eos=True)
    small = harness.add(prompt(4, seed=3), max_tokens=1)
    while not harness.streams[big].tokens:
        assert not harness.streams[small].tokens
        harness.step()
    harness.run()
    harness.check()


def test_steady_decode_says_nothing_but_the_blocks_it_needs():
    harness = Harness(limits(num_blocks=64))
    for seed in range(4):
        harness.add(prompt(9 + seed, seed), max_tokens=40, ignore_eos=True)
    for _ in range(30):
        harness.step()
    repeated = [diff for diff in harness.diffs if diff.slots is None]
    # The first step joins, the second goes from prompts to single tokens, all others are the same again.
    assert len(repeated) == 28
    for diff in repeated:
        assert diff.num_tokens is None
        assert not len(diff.leaves)
        assert not diff.joins
    assert sum(len(diff.append_slots) for diff in repeated) == 4 * 2
    harness.run()
    harness.check()


def test_a_join_or_a_leave_ends_the_steady_state_for_one_step():
    harness = Harness()
    first = harness.add(prompt(9), max_tokens=60, ignore_eos=True)
    for _ in range(3):
        harness.step()
    assert harness.diffs[-1].slots is None
    second = harness.add(prompt(1, seed=5), max_tokens=60, ignore_eos=True)
    harness.step()
    assert len(harness.diffs[-1].joins) == 1
    assert list(plan(harness.diffs[-1]).values()) == [1, 1]
    assert harness.streams[second].cached == 0
    harness.step()
    assert harness.diffs[-1].slots is None
    harness.abort(first)
    harness.step()
    assert len(harness.diffs[-1].leaves) == 1
    assert list(plan(harness.diffs[-1]).values()) == [1]
    harness.step()
    assert harness.diffs[-1].slots is None
    harness.run()
    harness.check()


def test_waiting_behind_full_slots_does_not_end_the_steady_state():
    harness = Harness(limits(max_num_seqs=1))
    harness.add(prompt(9), max_tokens=30, ignore_eos=True)
    harness.add(prompt(9, seed=1), max_tokens=3)
    for _ in range(10):
        harness.step()
    assert [diff.slots is None for diff in harness.diffs[2:]] == [True] * 8
    harness.run()
    harness.check()


def test_leaves_wait_for_the_next_step_and_the_slot_may_be_taken_again_in_it():
    harness = Harness(limits(max_num_seqs=1))
    harness.add(prompt(5), max_tokens=1)
    harness.step()
    assert harness.step() is None
    harness.add(prompt(6), max_tokens=1)
    harness.step()
    (diff,) = harness.diffs[1:]
    assert diff.step == 2
    assert diff.leaves.tolist() == [0]
    assert [join.slot for join in diff.joins] == [0]


class TestStops:
    """One request of 3 prompt tokens, and a worker whose tokens the test dictates."""

    def finishes(self, tokens: list[int], max_tokens: int = 8, **params: object) -> list[Finish]:
        harness = Harness()
        request = harness.request(prompt(3), SamplingParams(max_tokens=max_tokens, **params))
        harness.scheduler.add(request)
        finishes: list[Finish] = []
        for token in tokens:
            diff = harness.scheduler.schedule()
            assert diff is not None
            output = harness.scheduler.settle(result(diff, [0], [token]))
            assert output.token_ids.tolist() == [token], "the token that stops a request is reported"
            finishes.append(Finish(int(output.finish[0])))
        harness.scheduler.check_integrity()
        assert harness.scheduler.has_work == (finishes[-1] is Finish.NONE)
        state = {Finish.STOP: State.FINISHED_STOPPED, Finish.LENGTH: State.FINISHED_LENGTH}
        assert request.state is state.get(finishes[-1], State.RUNNING)
        return finishes

    def test_eos(self):
        assert self.finishes([1, EOS]) == [Finish.NONE, Finish.STOP]

    def test_eos_as_the_very_first_token(self):
        assert self.finishes([EOS]) == [Finish.STOP]

    def test_eos_ignored(self):
        assert self.finishes([EOS, 1], ignore_eos=True) == [Finish.NONE, Finish.NONE]

    def test_stop_ids(self):
        assert self.finishes([1, 30], stop_token_ids=(30, 31)) == [Finish.NONE, Finish.STOP]

    def test_stop_ids_count_when_eos_is_ignored(self):
        assert self.finishes([EOS, 31], stop_token_ids=(30, 31), ignore_eos=True)[-1] is Finish.STOP

    def test_a_stop_id_in_the_prompt_does_not_matter(self):
        assert self.finishes([1], stop_token_ids=tuple(prompt(3))) == [Finish.NONE]

    def test_length(self):
        assert self.finishes([1, 2, 3], max_tokens=3) == [Finish.NONE, Finish.NONE, Finish.LENGTH]

    def test_one_token(self):
        assert self.finishes([1], max_tokens=1) == [Finish.LENGTH]

    def test_a_stop_at_the_length_limit_is_a_stop(self):
        assert self.finishes([1, EOS], max_tokens=2)[-1] is Finish.STOP

    @pytest.mark.parametrize("stop", [EOS, 30])
    def test_min_tokens(self, stop):
        finishes = self.finishes([stop, stop, stop], min_tokens=2, stop_token_ids=(30,))
        assert finishes == [Finish.NONE, Finish.NONE, Finish.STOP]

    def test_a_slot_forgets_the_stop_ids_of_its_last_request(self):
        harness = Harness(limits(max_num_seqs=1))
        harness.add(prompt(3), max_tokens=5, stop_token_ids=tuple(range(VOCAB)))
        harness.run()
        stream = harness.add(prompt(3), max_tokens=5, ignore_eos=True)
        harness.run()
        assert harness.streams[stream].finish is Finish.LENGTH


@pytest.mark.parametrize("length", [254, 255])
@pytest.mark.parametrize("max_tokens", [1, 2, 256])
def test_the_end_of_the_context(length, max_tokens):
    harness = Harness()
    stream = harness.add(prompt(length), max_tokens=max_tokens, ignore_eos=True)
    harness.run()
    harness.check()
    assert len(harness.streams[stream].tokens) == min(max_tokens, 256 - length)
    assert harness.streams[stream].finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("length", "num_output", "max_tokens"),
    [(256, 0, 1), (257, 0, 1), (0, 0, 1), (10, 5, 5), (10, 6, 5), (200, 56, 100)],
)
def test_what_can_never_run_is_refused_and_changes_nothing(length, num_output, max_tokens):
    harness = Harness()
    running = harness.add(prompt(10), max_tokens=5, ignore_eos=True)
    harness.step()
    with pytest.raises(RequestFailed, match="stream 1 of frontend 0"):
        harness.add(prompt(length), max_tokens, output=prompt(num_output, 1))
    harness.scheduler.check_integrity()
    harness.run()
    harness.check()
    assert list(harness.streams) == [running]


def test_what_does_not_fit_into_the_cache_is_refused_and_what_just_fits_runs():
    harness = Harness(limits(num_blocks=4))
    with pytest.raises(RequestFailed, match="do not fit into a KV cache for 64"):
        harness.add(prompt(40), max_tokens=26)
    stream = harness.add(prompt(40), max_tokens=25, ignore_eos=True)
    harness.run()
    harness.check()
    assert len(harness.streams[stream].tokens) == 25


def test_a_name_in_use_is_refused():
    harness = Harness()
    harness.add(prompt(5), max_tokens=3)
    with pytest.raises(RequestFailed, match="here already"):
        harness.scheduler.add(harness.request(prompt(5), SamplingParams(max_tokens=3), stream=0))
    harness.add(prompt(5), max_tokens=3, frontend=1)
    harness.run()
    harness.check()


def test_more_hashes_than_blocks_are_refused():
    harness = Harness()
    request = harness.request(prompt(20), SamplingParams(max_tokens=3))
    request.hashes += request.hashes
    with pytest.raises(RequestFailed, match="2 block hashes for 20"):
        harness.scheduler.add(request)


def test_a_resumed_stream_goes_on_where_it_was():
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    tokens, _ = alone(prompt(20), 20, params, LIMITS)
    harness = Harness()
    stream = harness.add(prompt(20), max_tokens=30, ignore_eos=True, output=tokens[:17])
    harness.run()
    assert harness.streams[stream].tokens == tokens[17:]
    assert harness.diffs[0].joins[0].num_prompt == 20


class TestAbort:
    def test_unknown(self):
        harness = Harness()
        assert not harness.scheduler.abort(0, 3)

    def test_waiting(self):
        harness = Harness(limits(max_num_seqs=1))
        harness.add(prompt(5), max_tokens=5, ignore_eos=True)
        gone = harness.add(prompt(5, seed=1), max_tokens=5)
        next_one = harness.add(prompt(5, seed=2), max_tokens=5, ignore_eos=True)
        harness.step()
        assert harness.abort(gone)
        assert not harness.abort(gone)
        harness.run()
        harness.check()
        # The next one takes the place at once: nobody works for those who left.
        assert len(harness.diffs) == 10
        assert len(harness.streams[next_one].tokens) == 5

    def test_nobody_works_for_a_queue_that_has_left(self):
        harness = Harness(limits(max_num_seqs=1))
        harness.add(prompt(5), max_tokens=5, ignore_eos=True)
        harness.step()
        gone = [harness.add(prompt(50, seed), max_tokens=50) for seed in range(1, 20)]
        for stream in gone:
            harness.abort(stream)
        fresh = harness.add(prompt(5, seed=20), max_tokens=5, ignore_eos=True)
        for _ in range(5):
            harness.step()
        assert len(harness.streams[fresh].tokens) == 1
        harness.run()
        harness.check()

    def test_running(self):
        harness = Harness()
        gone = harness.add(prompt(40), max_tokens=50, ignore_eos=True)
        stays = harness.add(prompt(40, seed=1), max_tokens=8, ignore_eos=True)
        for _ in range(3):
            harness.step()
        free = harness.scheduler.statistics().free_blocks
        harness.abort(gone)
        assert harness.scheduler.statistics().free_blocks == free + 3
        harness.step()
        assert len(harness.diffs[-1].leaves) == 1
        harness.run()
        harness.check()
        assert len(harness.streams[stays].tokens) == 8

    def test_between_two_chunks(self):
        harness = Harness(limits(max_num_batched_tokens=16))
        gone = harness.add(prompt(100), max_tokens=5)
        harness.step()
        harness.abort(gone)
        assert harness.step() is None
        harness.run()

    def test_preempted(self):
        harness = Harness(limits(num_blocks=4, max_model_len=64))
        for seed in range(2):
            harness.add(prompt(16, seed), max_tokens=40, ignore_eos=True)
        while not harness.scheduler.statistics().preemptions:
            harness.step()
        assert harness.scheduler.statistics().waiting == 1
        harness.abort(1)
        assert harness.scheduler.statistics().waiting == 0
        harness.run()
        harness.check()

    def test_finished(self):
        harness = Harness()
        stream = harness.add(prompt(5), max_tokens=1)
        harness.run()
        assert not harness.abort(stream)

    def test_in_flight(self):
        harness = Harness()
        gone = harness.add(prompt(40), max_tokens=50, ignore_eos=True)
        stays = harness.add(prompt(20, seed=1), max_tokens=8, ignore_eos=True)
        output = harness.step(in_flight=lambda: harness.abort(gone))
        assert output is not None
        assert output.streams.tolist() == [stays]
        harness.run()
        harness.check()
        assert harness.streams[gone].tokens == []
        # What the aborted request computed was never settled, so nobody may find it.
        again = harness.add(prompt(40), max_tokens=1)
        harness.run()
        assert harness.streams[again].cached == 0

    def test_all_in_flight_with_a_newcomer(self):
        harness = Harness(limits(max_num_seqs=2))
        streams = [harness.add(prompt(20, seed), max_tokens=9) for seed in range(2)]

        def replace_all():
            for stream in streams:
                harness.abort(stream)
            harness.add(prompt(20, seed=3), max_tokens=9)

        output = harness.step(in_flight=replace_all)
        assert output is not None
        assert len(output.streams) == 0
        harness.run()
        harness.check()
        assert harness.streams[2].tokens

    def test_a_frontend(self):
        harness = Harness(limits(max_num_seqs=2))
        for seed in range(6):
            harness.add(prompt(9, seed), max_tokens=4, frontend=seed % 2, ignore_eos=True)
        harness.step()
        assert harness.scheduler.abort_frontend(1) == 3
        assert harness.scheduler.abort_frontend(1) == 0
        for stream in (1, 3, 5):
            harness.streams[stream].aborted = True
        harness.run()
        harness.check()
        assert all(len(harness.streams[stream].tokens) == 4 for stream in (0, 2, 4))


class TestProtocol:
    """What the engine must not do."""

    def test_steps_are_settled_in_order(self):
        harness = Harness()
        harness.add(prompt(5))
        first, second = harness.scheduler.schedule(), harness.scheduler.schedule()
        harness.worker.execute(first)
        with pytest.raises(AssertionError):
            harness.scheduler.settle(harness.worker.execute(second))

    def test_only_a_scheduled_step_can_be_settled(self):
        harness = Harness()
        harness.add(prompt(5))
        nothing = np.zeros(0, dtype=np.int32)
        with pytest.raises(AssertionError, match="no step is in flight"):
            harness.scheduler.settle(StepResult(1, nothing, nothing))
        diff = harness.scheduler.schedule()
        assert diff is not None
        with pytest.raises(AssertionError):
            harness.scheduler.settle(result(diff, [1], [1]))

    def test_the_hasher_must_have_the_same_blocks(self):
        with pytest.raises(AssertionError):
            Scheduler(limits(block_size=16), BlockHasher(b"s" * 32, 32))

    def test_no_limit_is_zero(self):
        with pytest.raises(AssertionError):
            limits(max_num_seqs=0)
