"""EngineCore with several frontends: who gets what, deadlines, control calls, statistics, waking up."""

from __future__ import annotations

import threading
import time

import pytest
from core_harness import EPOCH, CoreHarness
from engine_numbers import GPU_GAUGES
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_harness import LIMITS, alone, limits, prompt

from streamserve.engine.meter import STEP_TOKENS, StepMeter
from streamserve.messages import Finish, Kind, encode_call
from streamserve.sampling import SamplingParams

PLAIN = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def pair():
    with CoreHarness(2) as harness:
        yield harness


def check_tokens(harness: CoreHarness) -> None:
    """Every finished stream has what it would have alone."""
    for streams in harness.streams:
        for stream in streams.values():
            if stream.finish is not Finish.EXPIRED:
                wanted = alone(stream.prompt, len(stream.prompt), stream.params, LIMITS)
                assert (stream.tokens, stream.finish) == wanted


def test_each_frontend_gets_its_own(pair):
    for frontend, seed in ((0, 1), (1, 2), (0, 3)):
        pair.add(frontend, prompt(5, seed), PLAIN)
    pair.run()
    check_tokens(pair)
    assert [len(streams) for streams in pair.streams] == [2, 1]


def test_the_next_step_is_decided_while_the_last_one_runs():
    with CoreHarness(2, depth=2) as harness:
        for frontend, seed in ((0, 1), (1, 2), (0, 3)):
            harness.add(frontend, prompt(5, seed), PLAIN)
        harness.step()
        # Both steps have run, and the tokens of the first have been sent.
        assert harness.executor.num_submitted == 2
        assert [len(stream.tokens) for stream in harness.streams[0].values()] == [1, 1]
        harness.run()
        check_tokens(harness)
        assert harness.core.statistics()["steps"] == harness.executor.num_submitted == PLAIN.max_tokens


def test_log_probabilities_have_a_frame_of_their_own(pair):
    pair.add(0, prompt(5, 1), PLAIN)
    asks = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
    pair.add(0, prompt(5, 2), asks)
    pair.add(1, prompt(5, 3), PLAIN)
    pair.run()
    check_tokens(pair)
    assert all(frame.logprobs is None for frame in pair.streams[0][0].frames)
    assert all(frame.logprobs.top.shape == (1, 2) for frame in pair.streams[0][1].frames)
    assert all(frame.logprobs is None for frame in pair.streams[1][0].frames)
    begun, step = Kind.BEGUN, Kind.STEP
    assert pair.frames == [[begun, *[step] * 12], [begun, *[step] * 6]]


def test_a_frame_is_as_wide_as_the_frontend_needs(pair):
    for frontend, num_top in ((0, 1), (0, 4), (1, 2)):
        params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=num_top)
        pair.add(frontend, prompt(5, num_top), params)
    pair.run()
    check_tokens(pair)
    assert pair.streams[0][0].frames[0].logprobs.top.shape == (2, 4)
    assert pair.streams[1][0].frames[0].logprobs.top.shape == (1, 2)


# Deadlines


def test_what_waits_too_long_is_ended_and_never_runs():
    with CoreHarness(2, limits(max_num_seqs=1)) as harness:
        harness.add(0, prompt(5), SamplingParams(max_tokens=50, ignore_eos=True))
        harness.step()
        late = harness.add(0, prompt(5), PLAIN, deadline_ns=2000)
        others = [harness.add(1, prompt(5), PLAIN, deadline_ns=deadline) for deadline in (1500, 3000, 0)]
        harness.step()
        assert harness.core.seconds_to_deadline() == pytest.approx(500e-9)
        harness.now_ns = 2000
        harness.step()
        assert harness.streams[0][late].finish is Finish.EXPIRED
        assert [harness.streams[1][stream].finish for stream in others] == [Finish.EXPIRED, 0, 0]
        harness.now_ns = 3001
        harness.run()
        assert harness.streams[1][others[1]].finish is Finish.EXPIRED
        assert harness.streams[1][others[2]].finish is Finish.LENGTH
        assert not any(harness.streams[1][stream].tokens for stream in others[:2])
        assert harness.core.statistics()["expired"] == 3
        assert harness.core.seconds_to_deadline() is None


def test_one_that_comes_after_its_deadline_is_ended_at_once(pair):
    late = pair.add(1, prompt(5), PLAIN, deadline_ns=1000)
    assert not pair.step()
    assert pair.streams[1][late].finish is Finish.EXPIRED
    assert pair.core.statistics()["steps"] == 0


class Blocked:
    """A scheduler in which nothing can run, as when all that wait are waiting for something else."""

    def __init__(self, scheduler):
        self._scheduler = scheduler

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def schedule(self, pace=None):
        return None


def test_a_sleeping_engine_wakes_up_for_a_deadline(monkeypatch):
    with CoreHarness() as harness:
        harness.core._scheduler = Blocked(harness.scheduler)
        slept: list[float | None] = []

        def wait(timeout_s):
            slept.append(timeout_s)
            if timeout_s is None:
                harness.loop.stop()
            else:
                harness.now_ns += int(timeout_s * 1e9)
            return False

        monkeypatch.setattr(harness.engine_bell, "wait", wait)
        stream = harness.add(0, prompt(5), PLAIN, deadline_ns=1000 + 5 * 10**9)
        far = harness.add(0, prompt(5), PLAIN, deadline_ns=1000 + 30_000 * 10**9)
        harness.loop.run()
        harness.read(0)
        assert harness.streams[0][stream].finish is Finish.EXPIRED
        assert harness.streams[0][far].finish is Finish.EXPIRED
        assert slept[0] == 5.0
        assert max(slept[:-1]) == 3600.0, "poll() cannot count for ever"


def test_idle_time_is_used_piece_by_piece(monkeypatch):
    """Who comes meanwhile is served before the next piece; once all is done, the engine sleeps."""
    with CoreHarness() as harness:
        executor = harness.executor
        executor.num_pieces = 5
        work_ahead, done_at = executor.work_ahead, []

        def work() -> bool:
            did = work_ahead()
            done_at.append((executor.num_submitted, did))
            if did and executor.num_pieces == 3:
                harness.add(0, prompt(5), PLAIN)
            return did

        def wait(timeout_s):
            assert timeout_s is None
            harness.loop.stop()
            return False

        monkeypatch.setattr(executor, "work_ahead", work)
        monkeypatch.setattr(harness.engine_bell, "wait", wait)
        harness.loop.run()
        steps = PLAIN.max_tokens
        assert done_at == [(0, True), (0, True), *[(steps, True)] * 3, (steps, False)]
        harness.read(0)
        assert harness.streams[0][0].finish is Finish.LENGTH


def test_an_engine_at_work_ahead_stops_when_told(monkeypatch):
    with CoreHarness() as harness:
        pieces = iter(range(10))

        def work() -> bool:
            if next(pieces) == 3:
                harness.loop.stop()
            return True

        monkeypatch.setattr(harness.executor, "work_ahead", work)
        harness.loop.run()
        assert next(pieces) == 4


def test_a_real_bell_wakes_up_for_a_deadline():
    with CoreHarness() as harness:
        import time

        harness.core._wall_clock_ns = time.time_ns
        harness.core._scheduler = Blocked(harness.scheduler)
        deadline_ns = time.time_ns() + 20_000_000
        harness.add(0, prompt(5), PLAIN, deadline_ns=deadline_ns)
        thread = threading.Thread(target=harness.loop.run)
        thread.start()
        try:
            while not harness.streams[0][0].finish:
                if harness.channels[0].reader.arm():
                    assert harness.channels[0].bell.wait(60)
                harness.read(0)
            assert time.time_ns() >= deadline_ns
        finally:
            harness.loop.stop()
            thread.join(60)
        assert not thread.is_alive()


# Control calls


def test_a_relay_goes_to_all_others_and_their_answers_come_back():
    with CoreHarness(3) as harness:
        harness.call(1, 7, {"method": "relay", "body": {"find": "x"}})
        harness.step()
        assert harness.replies == [[], [(7, {"asked": 2})], []]
        question = (7, {"origin": [1, 0], "body": {"find": "x"}})
        assert harness.relays == [[question], [], [question]]
        for frontend, answer in ((0, None), (2, {"id": "x"})):
            body = {"method": "relay_reply", "to": [1, 0], "call_id": 7, "body": answer}
            harness.call(frontend, 1, body)
        harness.step()
        assert harness.replies[1][1:] == [(7, {"answer": None}), (7, {"answer": {"id": "x"}})]
        assert harness.replies[0] == harness.replies[2] == []


def test_a_relay_of_the_only_frontend_asks_nobody():
    with CoreHarness(1) as harness:
        harness.call(0, 1, {"method": "relay", "body": 1})
        harness.step()
        assert harness.replies == [[(1, {"asked": 0})]]


def test_a_broken_call_costs_nothing_but_itself(pair):
    pair.call(0, 1, {"method": "relay_reply", "to": [9, 0], "call_id": 1, "body": None})
    pair.call(0, 2, {"method": "relay"})
    pair.call(0, 3, {"method": "what"})
    pair.push(0, Kind.CALL, encode_call(EPOCH - 1, 4, {"method": "ping"}))
    pair.call(0, 5, {"method": "reset_prefix_cache"})
    pair.step()
    assert [call_id for call_id, _ in pair.replies[0]] == [1, 2, 3, 5]
    assert [reply["ok"] for _, reply in pair.replies[0]] == [False, False, False, True]


@pytest.mark.parametrize("length", [0, 3, 4, 24, 92, 100])
@pytest.mark.parametrize("kind", [Kind.ADD, Kind.ABORT, Kind.CALL, Kind.HELLO, 999])
def test_a_frame_that_is_too_short_costs_nothing_but_itself(pair, kind, length):
    frame = EPOCH.to_bytes(4, "little") + b"\xff" * 200
    pair.push(0, kind, [frame[:length]])
    pair.add(1, prompt(5, 1), PLAIN)
    pair.run()
    check_tokens(pair)


# Statistics

KEYS = {
    "running",
    "waiting",
    "num_blocks",
    "free_blocks",
    "prefix_queries",
    "prefix_hits",
    "preemptions",
    "expired",
    "prompt_tokens",
    "generation_tokens",
    "steps",
    "step_tokens",
    *(f"step_tokens_le_{bound}" for bound in STEP_TOKENS),
    *(f"{prefix}{part}_ns" for prefix in ("", "last_") for part in ("schedule", "execute", "settle")),
}


def test_statistics_add_up(pair):
    pair.add(0, prompt(20, 1), PLAIN)
    pair.add(1, prompt(5, 2), PLAIN)
    pair.run()
    pair.call(1, 1, {"method": "ping"})
    pair.step()
    ((_, reply),) = pair.replies[1]
    stats = reply["stats"]
    assert set(stats) == KEYS
    assert all(type(value) is int for value in stats.values())
    assert (stats["prompt_tokens"], stats["generation_tokens"]) == (25, 12)
    assert (stats["steps"], stats["step_tokens"]) == (6, 25 + 2 * 5)
    assert [stats[f"step_tokens_le_{bound}"] for bound in (1, 8, 16, 32, 8192)] == [0, 5, 5, 6, 6]
    assert min(stats["schedule_ns"], stats["execute_ns"], stats["settle_ns"]) > 0
    assert stats["last_schedule_ns"] < stats["schedule_ns"]


def test_the_workers_numbers_are_among_them(pair):
    pair.executor.numbers = {"graph_fallbacks": 3}
    pair.call(1, 1, {"method": "ping"})
    pair.step()
    ((_, reply),) = pair.replies[1]
    assert reply["stats"]["graph_fallbacks"] == 3
    assert set(reply["stats"]) == KEYS | {"graph_fallbacks"}


def test_the_workers_numbers_are_documented():
    from streamserve import messages

    for key in GPU_GAUGES:
        family, _, part = key.rpartition("_")
        assert key in messages.__doc__ or (family in messages.__doc__ and f"_{part}" in messages.__doc__), key


def test_the_keys_are_documented():
    from streamserve import messages

    listed = messages.__doc__.replace("_le_1 … _le_16384", "_le_1 step_tokens_le_16384")
    inner = {f"step_tokens_le_{bound}" for bound in STEP_TOKENS[1:-1]}
    for key in KEYS - inner:
        assert key in listed or key.startswith("last_"), key


def test_a_step_of_any_size_has_its_place_in_the_histogram():
    meter = StepMeter()
    for num_tokens in (1, 8, 9, 100_000):
        meter.record(num_tokens, 1, 2, 3)
    numbers = meter.numbers()
    assert [numbers[f"step_tokens_le_{bound}"] for bound in (1, 8, 16, 8192)] == [1, 2, 3, 3]
    assert (numbers["steps"], numbers["step_tokens"]) == (4, 100_018)
    assert (numbers["schedule_ns"], numbers["execute_ns"], numbers["settle_ns"]) == (4, 8, 12)
    assert (numbers["last_schedule_ns"], numbers["last_execute_ns"], numbers["last_settle_ns"]) == (1, 2, 3)


# When requests begin


def test_frontends_hear_when_their_requests_begin(pair):
    before_ns = time.monotonic_ns()
    for frontend in (0, 1, 0):
        pair.add(frontend, prompt(5, frontend), PLAIN)
    pair.step()
    moments = {stream.began_ns for streams in pair.streams for stream in streams.values()}
    assert before_ns <= min(moments) == max(moments) <= time.monotonic_ns()
    assert pair.frames == [[Kind.BEGUN, Kind.STEP]] * 2
    pair.run()
    assert pair.frames == [[Kind.BEGUN, *[Kind.STEP] * 6]] * 2


def test_a_request_that_waits_for_a_slot_begins_when_it_gets_one():
    with CoreHarness(1, limits(max_num_seqs=1)) as harness:
        streams = [harness.add(0, prompt(5, seed), PLAIN) for seed in (1, 2)]
        harness.step()
        first, second = (harness.streams[0][stream] for stream in streams)
        assert first.began_ns is not None
        assert second.began_ns is None
        while not first.finish:
            harness.step()
        freed_ns = time.monotonic_ns()
        harness.run()
        assert second.began_ns >= freed_ns


def test_a_long_prompt_begins_with_its_first_part():
    with CoreHarness(1, limits(max_num_batched_tokens=8)) as harness:
        harness.add(0, prompt(30), PLAIN)
        harness.step()
        (stream,) = harness.streams[0].values()
        assert stream.began_ns is not None
        assert not stream.tokens
        harness.run()
        assert len(stream.tokens) == 6


def test_who_was_preempted_does_not_begin_again():
    sizes = limits(max_num_batched_tokens=24, num_blocks=12, block_size=4, max_model_len=100)
    with CoreHarness(1, sizes) as harness:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        for seed in range(3):
            harness.add(0, prompt(8, seed), params)
        harness.run()
        assert harness.core.statistics()["preemptions"] > 0
        # `Received` refuses to begin twice.
        assert all(stream.began_ns for stream in harness.streams[0].values())


def test_what_never_ran_never_began(pair):
    expired = pair.add(0, prompt(5, 1), PLAIN, deadline_ns=pair.now_ns - 1)
    aborted = pair.add(1, prompt(5, 2), PLAIN)
    pair.abort(1, aborted)
    pair.run()
    assert pair.streams[0][expired].finish is Finish.EXPIRED
    assert pair.streams[0][expired].began_ns is None
    assert pair.streams[1][aborted].began_ns is None


# Anything at once


@st.composite
def wishes(draw):
    max_tokens = draw(st.integers(1, 20))
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 0, 1, 20])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 20])),
    )
    rest = {
        "tenant": draw(st.sampled_from(["", "a"])),
        "priority": draw(st.integers(0, 1)),
        "deadline_ns": draw(st.sampled_from([0, 0, 1005, 1020])),
    }
    return draw(st.integers(0, 1)), prompt(draw(st.integers(1, 60)), draw(st.integers(0, 3))), params, rest


ACTIONS = st.one_of(
    wishes(),
    wishes(),
    st.just("step"),
    st.sampled_from([0, 1]),
    st.sampled_from(["abort", "time", "call"]),
)


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=30, max_size=90),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    capacity=st.sampled_from([1 << 11, 1 << 14]),
)
def test_two_frontends_that_read_when_they_like(actions, policy, capacity):
    """Full rings, frontends that ask for log probabilities and such that do not, deadlines, aborts."""
    sizes = limits(max_num_batched_tokens=24, num_blocks=30, block_size=4, max_model_len=100)
    with CoreHarness(2, sizes, policy, capacity) as harness:
        num_calls = 0
        for action in actions:
            if isinstance(action, tuple):
                frontend, tokens, params, rest = action
                harness.add(frontend, tokens, params, **rest)
                harness.core.admit()
            elif action == "step":
                for _ in range(5):
                    harness.core.step()
                event("a full ring" if any(box.has_backlog for box in harness.rings.outboxes) else "room")
            elif action == "abort":
                for frontend, streams in enumerate(harness.streams):
                    live = [number for number, one in streams.items() if not (one.finish or one.aborted)]
                    if live:
                        harness.abort(frontend, live[0])
                harness.core.admit()
            elif action == "time":
                harness.now_ns += 4
            elif action == "call":
                num_calls += 1
                harness.call(num_calls % 2, num_calls, {"method": "reset_prefix_cache"})
                harness.core.admit()
            else:
                harness.read(action)
        harness.run()
        harness.scheduler.check_integrity()
        for streams in harness.streams:
            for stream in streams.values():
                if stream.aborted:
                    continue
                assert stream.finish
                if stream.finish is Finish.EXPIRED:
                    assert not stream.tokens
                else:
                    wanted = alone(stream.prompt, len(stream.prompt), stream.params, sizes)
                    assert (stream.tokens, stream.finish) == wanted
        assert len(harness.replies[0]) + len(harness.replies[1]) == num_calls
        statistics = harness.core.statistics()
        event("preempted" if statistics["preemptions"] else "not preempted")
        event("expired" if statistics["expired"] else "not expired")
        assert (statistics["running"], statistics["waiting"]) == (0, 0)
        assert statistics["free_blocks"] == statistics["num_blocks"]
