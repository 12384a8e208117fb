"""A scheduler and a fake worker that holds it to the contract of `streamserve.engine.step`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from streamserve.engine.scheduler import Request, Scheduler, SchedulerLimits, StepOutput
from streamserve.engine.scheduler.sharing import UNPACED
from streamserve.engine.step import PromptLogprobs, StepDiff, StepResult
from streamserve.hashing import BlockHasher
from streamserve.messages import AddRequest, Finish, Logprobs
from streamserve.sampling import SamplingParams

VOCAB = 40
EOS = 7
LIMITS = SchedulerLimits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    long_prefill_token_threshold=0,
    num_blocks=64,
    block_size=16,
    max_model_len=256,
    enable_prefix_caching=True,
    eos_token_ids=(EOS,),
)


def limits(**changes: object) -> SchedulerLimits:
    """`LIMITS` with some of them changed."""
    return replace(LIMITS, **changes)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids; those of one seed begin alike, and none of them is the end-of-sequence token."""
    return np.random.default_rng(seed).integers(EOS + 1, VOCAB, 4096)[:length].tolist()


def chain(tokens: Sequence[int]) -> list[int]:
    """For each position a number that stands for all tokens up to there."""
    numbers, last = [], 0
    for token in tokens:
        last = hash((last, token))
        numbers.append(last)
    return numbers


def choose(last: int, num_output: int, params: SamplingParams, limits: SchedulerLimits) -> int:
    """The fake model: the next token after the tokens that `last` stands for."""
    token = (last >> 7) % VOCAB
    masked = {*limits.eos_token_ids, *params.stop_token_ids} if num_output < params.min_tokens else set()
    while token in masked:
        token = (token + 1) % VOCAB
    return token


def alone(
    tokens: Sequence[int], num_prompt: int, params: SamplingParams, limits: SchedulerLimits
) -> tuple[list[int], Finish]:
    """What a request generates, written down in the plainest way."""
    tokens = list(tokens)
    num_known = len(tokens)
    while True:
        num_output = len(tokens) - num_prompt
        token = choose(chain(tokens)[-1], num_output, params, limits)
        tokens.append(token)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(limits.eos_token_ids))
        if token in ends and num_output >= params.min_tokens:
            return tokens[num_known:], Finish.STOP
        if len(tokens) - num_prompt == params.max_tokens or len(tokens) == limits.max_model_len:
            return tokens[num_known:], Finish.LENGTH


def likelihood(position: int, token: int, num_top: int, width: int | None = None) -> tuple[list, list]:
    """The fake model's ids and log probabilities at a position: the token there first, then the likeliest.

    What is behind `num_top`, up to `width`, is for nobody to look at.
    """
    blanks = [-1] * ((num_top if width is None else width) - num_top)
    ids = [token, *((token + position + index) % VOCAB for index in range(num_top))]
    values = [-float(position * VOCAB + token), *(-float(position + index) for index in range(num_top))]
    return ids + blanks, values + [float("nan")] * len(blanks)


def rows_of(likelihoods: Sequence[tuple[list, list]]) -> Logprobs:
    """`likelihood` of some positions as columns."""
    values = np.array([values for _, values in likelihoods], dtype=np.float32)
    ids = np.array([ids for ids, _ in likelihoods], dtype=np.int32)
    return Logprobs(values[:, 0].copy(), ids[:, 1:].copy(), values[:, 1:].copy())


def check_rows(logprobs: Logprobs, first: int, tokens: Sequence[int], num_top: int) -> None:
    """`logprobs` are those of `tokens`, which stand at `first` and behind."""
    assert logprobs.top.shape == logprobs.top_ids.shape == (len(tokens), num_top)
    if tokens:
        wanted = rows_of([likelihood(first + at, token, num_top) for at, token in enumerate(tokens)])
        np.testing.assert_array_equal(logprobs.chosen, wanted.chosen)
        np.testing.assert_array_equal(logprobs.top_ids, wanted.top_ids)
        np.testing.assert_array_equal(logprobs.top, wanted.top)


@dataclass
class Row:
    """What a worker keeps of a slot."""

    tokens: list[int]
    chain: list[int]
    num_prompt: int
    computed: int
    blocks: list[int]
    params: SamplingParams
    num_to_read: int


class FakeWorker:
    """Mirrors slots from differences alone, and keeps for every place of the KV cache what was written there.

    Attributes:
        rows: the occupied slots.
        content: for each block and offset the `chain` number written last, None before that.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.rows: dict[int, Row] = {}
        self.content = [[None] * limits.block_size for _ in range(limits.num_blocks)]
        self._limits = limits
        self._step = 0
        self._slots: list[int] = []
        self._counts: list[int] = []

    def execute(self, diff: StepDiff) -> StepResult:
        """Runs a step, asserting that it can be run."""
        assert diff.step == self._step + 1
        self._step = diff.step
        self._apply(diff)
        assert len(self._slots) <= self._limits.max_num_seqs
        for slot in self.rows.keys() - set(self._slots):
            row = self.rows[slot]
            is_over = len(row.tokens) == self._limits.limit(row.num_prompt, row.params.max_tokens)
            is_read = row.computed < len(row.tokens) - 1
            assert is_over or is_read, "who has a slot, is not over and reads no prompt runs in every step"
        assert set(self._slots) <= self.rows.keys()
        assert 0 < sum(self._counts) <= self._limits.max_num_batched_tokens
        plan = list(zip(self._slots, self._counts, strict=True))
        self._check_writers(plan)
        for slot, count in plan:
            self._write(self.rows[slot], count)
        prompts = [part for slot, count in plan for part in self._prompt_logprobs(slot, count)]
        sampled = [(slot, token) for slot, count in plan for token in self._advance(self.rows[slot], count)]
        return StepResult(
            step=diff.step,
            slots=np.array([slot for slot, _ in sampled], dtype=np.int32),
            token_ids=np.array([token for _, token in sampled], dtype=np.int32),
            logprobs=self._logprobs(sampled),
            prompt_logprobs=prompts,
        )

    def _logprobs(self, sampled: list[tuple[int, int]]) -> Logprobs | None:
        asked = [self.rows[slot].params.logprobs for slot, _ in sampled]
        width = max((num_top for num_top in asked if num_top is not None), default=None)
        if width is None:
            return None
        rows = []
        for (slot, token), num_top in zip(sampled, asked, strict=True):
            if num_top is None:
                rows.append(([-1] * (width + 1), [float("nan")] * (width + 1)))
            else:
                rows.append(likelihood(len(self.rows[slot].tokens) - 1, token, num_top, width))
        return rows_of(rows)

    def _prompt_logprobs(self, slot: int, count: int) -> list[PromptLogprobs]:
        """Of what this step predicts, whether or not an earlier step did before a preemption."""
        row = self.rows[slot]
        num_top = row.params.prompt_logprobs
        predicted = range(row.computed + 1, min(row.computed + count + 1, row.num_prompt))
        if num_top is None or not predicted:
            return []
        rows = rows_of([likelihood(at, row.tokens[at], num_top) for at in predicted])
        return [PromptLogprobs(slot, predicted[0], rows)]

    def _apply(self, diff: StepDiff) -> None:
        for slot in diff.leaves.tolist():
            del self.rows[slot]
        for join in diff.joins:
            assert join.slot not in self.rows
            assert 0 <= join.num_computed < len(join.tokens)
            assert join.num_computed % self._limits.block_size == 0
            tokens = join.tokens.tolist()
            self.rows[join.slot] = Row(
                tokens,
                chain(tokens),
                join.num_prompt,
                join.num_computed,
                join.blocks.tolist(),
                join.params,
                num_to_read=len(tokens) - join.num_computed,
            )
        for slot, block in zip(diff.append_slots.tolist(), diff.append_blocks.tolist(), strict=True):
            self.rows[slot].blocks.append(block)
        assert (diff.slots is None) == (diff.num_tokens is None)
        if diff.slots is not None and diff.num_tokens is not None:
            self._slots, self._counts = diff.slots.tolist(), diff.num_tokens.tolist()

    def _check_writers(self, plan: list[tuple[int, int]]) -> None:
        """A block that is written to belongs to the writer alone."""
        size = self._limits.block_size
        for slot, count in plan:
            row = self.rows[slot]
            assert 0 < count <= len(row.tokens) - row.computed
            assert row.computed + count <= len(row.blocks) * size, "the block table does not cover the step"
            assert len(set(row.blocks)) == len(row.blocks)
            written = set(row.blocks[row.computed // size : -(-(row.computed + count) // size)])
            for other, other_row in self.rows.items():
                assert other == slot or written.isdisjoint(other_row.blocks), (slot, other)

    def _write(self, row: Row, count: int) -> None:
        size = self._limits.block_size
        for position in range(row.computed, row.computed + count):
            self.content[row.blocks[position // size]][position % size] = row.chain[position]

    def _advance(self, row: Row, count: int) -> list[int]:
        """The token sampled, if the row has caught up; what attention would read is what was computed."""
        row.computed += count
        size = self._limits.block_size
        read = [self.content[row.blocks[at // size]][at % size] for at in range(row.computed)]
        assert read == row.chain[: row.computed], "the KV cache holds something else"
        if row.computed < len(row.tokens):
            return []
        token = choose(row.chain[-1], len(row.tokens) - row.num_prompt, row.params, self._limits)
        row.tokens.append(token)
        row.chain.append(hash((row.chain[-1], token)))
        return [token]


@dataclass
class Stream:
    """One request as its frontend sees it."""

    frontend: int
    prompt: list[int]
    known: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    cached: int | None = None
    aborted: bool = False
    num_prompt_rows: int = 0

    @property
    def is_live(self) -> bool:
        return not self.aborted and self.finish is Finish.NONE


class Harness:
    """Runs requests through scheduler and fake worker; every step is followed by `check_integrity`.

    Args:
        limits, policy: of the scheduler.
        depth: how many steps may be in flight at a time.

    Attributes:
        streams: all requests by stream number.
        diffs: every step that was scheduled.
        started: the streams that had a slot, in the order in which they got their first.
        now_ns: what time it is; `expire` sets it.
        pace: of the next steps.
    """

    def __init__(self, limits: SchedulerLimits = LIMITS, policy: str = "fcfs", depth: int = 1) -> None:
        self.limits = limits
        self.pace = UNPACED
        self._depth = depth
        self._in_flight: deque[StepResult] = deque()
        self.hasher = BlockHasher(b"s" * 32, limits.block_size)
        self.scheduler = Scheduler(limits, self.hasher, policy)
        self.worker = FakeWorker(limits)
        self.streams: dict[int, Stream] = {}
        self.diffs: list[StepDiff] = []
        self.started: list[int] = []
        self.now_ns = 0

    def add(
        self,
        tokens: Sequence[int],
        max_tokens: int = 8,
        *,
        output: Sequence[int] = (),
        frontend: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        deadline_ns: int = 0,
        **params: object,
    ) -> int:
        """Adds a request (`output`: tokens generated before) and returns its stream number."""
        settings = SamplingParams(max_tokens=max_tokens, **params)
        return self.add_with(
            tokens,
            settings,
            output=output,
            frontend=frontend,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            deadline_ns=deadline_ns,
        )

    def add_with(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        output: Sequence[int] = (),
        frontend: int = 0,
        **rest: object,
    ) -> int:
        """`add`, with the sampling parameters in one piece."""
        stream = len(self.streams)
        self.scheduler.add(self.request(tokens, params, output, stream, frontend, **rest))
        self.streams[stream] = Stream(frontend, list(tokens), [*tokens, *output], params)
        return stream

    def request(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        output: Sequence[int] = (),
        stream: int = 0,
        frontend: int = 0,
        cache_salt: str = "",
        **rest: object,
    ) -> Request:
        """A request as a frontend would send it."""
        prompt = np.array(tokens, dtype=np.int32)
        root = self.hasher.root(cache_salt.encode())
        hashes = self.hasher.chain(prompt, root) if self.limits.enable_prefix_caching else []
        known = np.array([*tokens, *output], dtype=np.int32)
        add = AddRequest(stream, known, len(prompt), params, hashes, cache_salt=cache_salt, **rest)
        return Request(frontend, add)

    def abort(self, stream: int) -> bool:
        """Nobody waits for `stream` any more."""
        known = self.scheduler.abort(self.streams[stream].frontend, stream)
        assert known == self.streams[stream].is_live
        self.streams[stream].aborted = True
        self.scheduler.check_integrity()
        return known

    def expire(self, now_ns: int) -> list[int]:
        """Lets time pass; the streams whose time in the queue has run out."""
        self.now_ns = now_ns
        expired = self.scheduler.expire(now_ns)
        for request in expired:
            stream = self.streams[request.stream]
            assert stream.is_live
            assert request.frontend == stream.frontend
            assert 0 < request.deadline_ns <= now_ns
            assert request.stream not in self.started
            stream.finish = Finish.EXPIRED
        self.scheduler.check_integrity()
        return [request.stream for request in expired]

    def step(self, in_flight: Callable[[], object] = lambda: None) -> StepOutput | None:
        """Schedules as far ahead as may be and settles one step. None if there was nothing to run.

        Args:
            in_flight: called while the worker has the steps.
        """
        while len(self._in_flight) < self._depth and self._launch():
            pass
        in_flight()
        if not self._in_flight:
            return None
        output = self.scheduler.settle(self._in_flight.popleft())
        self.scheduler.check_integrity()
        self._take(output)
        return output

    def _launch(self) -> bool:
        had_work = self.scheduler.has_work
        diff = self.scheduler.schedule(self.pace)
        self.scheduler.check_integrity()
        if not self._in_flight:
            assert (diff is not None) == had_work
        if diff is None:
            return False
        self.diffs.append(diff)
        self._note_starts(diff)
        self._in_flight.append(self.worker.execute(diff))
        return True

    def _note_starts(self, diff: StepDiff) -> None:
        for join in diff.joins:
            request = self.scheduler._table.requests[join.slot]
            if request.stream not in self.started:
                self.started.append(request.stream)
                assert not 0 < request.deadline_ns <= self.now_ns, "it began too late"

    def run(self, most_steps: int = 5000) -> None:
        """Steps until nothing is left to do: every stream is finished or aborted, every block is free."""
        for _ in range(most_steps):
            if self.step() is None:
                break
        else:
            raise AssertionError(f"still busy after {most_steps} steps")
        assert not any(stream.is_live for stream in self.streams.values())
        statistics = self.scheduler.statistics()
        assert (statistics.running, statistics.waiting) == (0, 0)
        assert statistics.free_blocks == statistics.num_blocks == self.limits.num_blocks

    def check(self) -> None:
        """Every finished stream generated what it would have generated alone."""
        for number, stream in self.streams.items():
            tokens, finish = alone(stream.known, len(stream.prompt), stream.params, self.limits)
            if stream.finish is Finish.EXPIRED:
                continue
            if stream.finish is Finish.NONE:
                assert stream.tokens == tokens[: len(stream.tokens)], number
            else:
                assert (stream.tokens, stream.finish) == (tokens, finish), number

    def _take(self, output: StepOutput) -> None:
        assert output.frontends.dtype == np.int32
        assert output.streams.dtype == np.uint64
        assert output.token_ids.dtype == np.int32
        assert output.finish.dtype == np.uint8
        assert output.cached is None or output.cached.dtype == np.uint32
        self._take_logprobs(output)
        for row, number in enumerate(output.streams.tolist()):
            stream = self.streams[number]
            assert stream.is_live, f"tokens for stream {number}, which is over"
            assert output.frontends[row] == stream.frontend
            if not stream.tokens:
                assert output.cached is not None, "the first token of a stream has its cached column"
                stream.cached = int(output.cached[row])
                assert stream.cached < len(stream.known)
            else:
                assert output.cached is None or output.cached[row] == 0
            stream.tokens.append(int(output.token_ids[row]))
            stream.finish = Finish(int(output.finish[row]))

    def _take_logprobs(self, output: StepOutput) -> None:
        for part in output.prompt_logprobs:
            stream = self.streams[part.stream]
            assert stream.is_live
            assert part.frontend == stream.frontend
            assert part.start == stream.num_prompt_rows + 1, "a position left out, or twice"
            end = part.start + len(part.logprobs.chosen)
            num_top = stream.params.prompt_logprobs
            check_rows(part.logprobs, part.start, stream.prompt[part.start : end], num_top)
            stream.num_prompt_rows = end - 1
        assert (output.logprobs is None) == (output.num_top is None)
        for row, number in enumerate(output.streams.tolist()):
            stream = self.streams[number]
            if stream.params.prompt_logprobs is not None:
                assert stream.num_prompt_rows == len(stream.prompt) - 1, "a token before its prompt"
            num_top = stream.params.logprobs
            if output.num_top is not None:
                assert output.num_top[row] == (-1 if num_top is None else num_top)
            if num_top is not None:
                rows = output.logprobs.rows(slice(row, row + 1), num_top)
                position = len(stream.known) + len(stream.tokens)
                check_rows(rows, position, [int(output.token_ids[row])], num_top)
