"""Any sequence of requests, steps and aborts, against a worker that checks each access to the KV cache.

Whatever happens to a request on its way (chunks, prefix hits, preemption, neighbours), its tokens are those
that it gets alone; nothing leaks; everybody finishes.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_harness import EOS, FakeWorker, Harness, Row, alone, prompt

from streamserve.engine.scheduler import SchedulerLimits
from streamserve.engine.scheduler.sharing import Pace
from streamserve.engine.step import StepDiff
from streamserve.errors import RequestFailed
from streamserve.sampling import SamplingParams

# Steps in flight.
DEPTHS = st.sampled_from([1, 2, 2, 3])
POLICIES = st.sampled_from(["fcfs", "priority", "fair"])


@st.composite
def sizes(draw):
    """Limits with memory for one request of full length, and not for many more."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_model_len = draw(st.integers(12, 40))
    return SchedulerLimits(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 32)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 2, 4, 7])),
        num_blocks=-(-max_model_len // block_size) + draw(st.integers(-1, 8)),
        block_size=block_size,
        max_model_len=max_model_len,
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        eos_token_ids=draw(st.sampled_from([(EOS,), (EOS, EOS + 3), ()])),
    )


@dataclass(frozen=True)
class Wish:
    """A request to come."""

    tokens: list[int]
    params: SamplingParams
    num_output: int
    frontend: int
    rest: dict[str, object]


@st.composite
def wishes(draw):
    """Prompts are beginnings of two long texts, some with an end of their own."""
    beginning = prompt(draw(st.integers(1, 20)), draw(st.integers(0, 1)))
    max_tokens = draw(st.integers(1, 24))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, min(3, max_tokens)])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (), (11,), (11, 20, 33)])),
        logprobs=draw(st.sampled_from([None, None, None, 0, 2, 5])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, None, 0, 3])),
    )
    return Wish(
        tokens=beginning + prompt(draw(st.sampled_from([0, 0, 1, 6])), draw(st.integers(2, 4))),
        params=params,
        num_output=draw(st.sampled_from([0, 0, 0, 1, 4])),
        frontend=draw(st.integers(0, 1)),
        rest={
            "priority": draw(st.integers(-1, 1)),
            "tenant": draw(st.sampled_from(["", "a", "b"])),
            "cache_salt": draw(st.sampled_from(["", "", "salt"])),
            "deadline_ns": draw(st.sampled_from([0, 0, 1, 5, 20])),
        },
    )


class ChangingWorker(FakeWorker):
    """Has other weights after each reset, and asserts that nobody is given blocks from before.

    Whatever a request computes rests on all that it computed before, so it is as old as its first block.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self.generation = 0
        self._written_in = [0] * limits.num_blocks
        self._joined_in: dict[int, int] = {}

    def _apply(self, diff: StepDiff) -> None:
        super()._apply(diff)
        for join in diff.joins:
            self._joined_in[id(self.rows[join.slot])] = self.generation
            for block in join.blocks[: join.num_computed // self._limits.block_size].tolist():
                assert self._written_in[block] == self.generation, "a block from before the reset"

    def _write(self, row: Row, count: int) -> None:
        super()._write(row, count)
        size = self._limits.block_size
        for block in row.blocks[row.computed // size : -(-(row.computed + count) // size)]:
            self._written_in[block] = self._joined_in[id(row)]


def add(harness: Harness, wish: Wish) -> None:
    """Adds the request, or sees it refused for a reason."""
    limits, tokens = harness.limits, wish.tokens
    output = alone(tokens, len(tokens), wish.params, limits)[0][:-1][: wish.num_output]
    most = min(len(tokens) + wish.params.max_tokens, limits.max_model_len)
    possible = len(tokens) + len(output) < most <= limits.num_blocks * limits.block_size + 1
    try:
        harness.add_with(tokens, wish.params, output=output, frontend=wish.frontend, **wish.rest)
    except RequestFailed:
        assert not possible
    else:
        assert possible


def finish(harness: Harness) -> None:
    """Runs to the end and checks everything."""
    harness.run()
    harness.check()
    statistics = harness.scheduler.statistics()
    note(str(statistics))
    event("preempted" if statistics.preemptions else "not preempted")
    event("hits" if statistics.prefix_hits else "no hits")
    event("expired" if statistics.expired else "not expired")


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(limits=sizes(), policy=POLICIES, depth=DEPTHS, first=st.lists(wishes(), max_size=6))
    def start(self, limits, policy, depth, first):
        self.harness = Harness(limits, policy, depth)
        self.worker = self.harness.worker = ChangingWorker(limits)
        self.add(first)

    @rule(passing=st.integers(1, 8))
    def pass_time(self, passing):
        before = self.harness.scheduler.statistics()
        expired = self.harness.expire(self.harness.now_ns + passing)
        after = self.harness.scheduler.statistics()
        assert before.waiting - after.waiting == after.expired - before.expired == len(expired)
        next_ns = self.harness.scheduler.next_deadline_ns
        assert next_ns is None or next_ns > self.harness.now_ns

    @rule(more=st.lists(wishes(), min_size=1, max_size=4))
    def add(self, more):
        for wish in more:
            add(self.harness, wish)
        self.harness.expire(self.harness.now_ns)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.harness.step()

    @rule(wish=wishes())
    def step_while_one_comes(self, wish):
        self.harness.step(lambda: add(self.harness, wish))
        self.harness.expire(self.harness.now_ns)

    @rule(which=st.integers(0, 1000))
    def step_while_one_goes(self, which):
        self.harness.step(lambda: self.abort(which))

    @rule(which=st.integers(0, 1000))
    def abort(self, which):
        if self.harness.streams:
            self.harness.abort(which % len(self.harness.streams))

    @rule(frontend=st.integers(0, 1), sure=st.sampled_from([False, False, True]))
    def abort_frontend(self, frontend, sure):
        if sure:
            theirs = [stream for stream in self.harness.streams.values() if stream.frontend == frontend]
            live = [stream for stream in theirs if stream.is_live]
            assert self.harness.scheduler.abort_frontend(frontend) == len(live)
            for stream in live:
                stream.aborted = True

    @rule(prompts=st.sampled_from([None, 0, 1, 3, 20]), documents=st.sampled_from([None, 0, 1, 3]))
    def pace(self, prompts, documents):
        self.harness.pace = Pace(prompts, documents)

    @rule()
    def reset_prefix_cache(self):
        assert self.harness.scheduler.reset_prefix_cache() == self.harness.limits.enable_prefix_caching
        self.worker.generation += 1

    @rule()
    def reset_in_flight(self):
        self.harness.step(self.reset_prefix_cache)

    @invariant()
    def whole(self):
        self.harness.scheduler.check_integrity()
        statistics = self.harness.scheduler.statistics()
        num_live = sum(stream.is_live for stream in self.harness.streams.values())
        assert statistics.running + statistics.waiting == num_live
        assert statistics.running <= self.harness.limits.max_num_seqs

    def teardown(self):
        if hasattr(self, "harness"):
            finish(self.harness)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@settings(max_examples=150, deadline=None)
@given(limits=sizes(), policy=POLICIES, depth=DEPTHS, crowd=st.lists(wishes(), min_size=2, max_size=14))
def test_a_crowd_at_once(limits, policy, depth, crowd):
    harness = Harness(limits, policy, depth)
    for wish in crowd:
        add(harness, wish)
    finish(harness)
