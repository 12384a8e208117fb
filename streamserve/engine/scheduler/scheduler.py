"""Scheduler: which requests run how many tokens in the next step, and what came of the last one.

There is no prefill and no decode here. A request has known tokens (prompt and output so far) and computed
ones; a step brings it forward by some tokens under a budget shared by all. When it has caught up, the worker
samples one more. Prompts in chunks, prefix hits, resumed and preempted requests are all the same to it.

The usual step, where every running request decodes one token, is a few vector operations: only requests that
need a block, join, leave or are cut short are touched one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamserve.engine.scheduler.admission import Admission, why_impossible
from streamserve.engine.scheduler.deadlines import Deadlines
from streamserve.engine.scheduler.growth import Growth
from streamserve.engine.scheduler.kv_cache import KVCache
from streamserve.engine.scheduler.limits import SchedulerLimits
from streamserve.engine.scheduler.output import PromptRows, SchedulerStatistics, StepOutput
from streamserve.engine.scheduler.policy import make_queue
from streamserve.engine.scheduler.sharing import share_budget
from streamserve.engine.scheduler.states import Request, State
from streamserve.engine.scheduler.table import Counts, RequestTable, Slots
from streamserve.engine.step import Join, StepDiff, StepResult
from streamserve.errors import RequestFailed
from streamserve.hashing import BlockHasher
from streamserve.messages import Finish

__all__ = ["Scheduler", "SchedulerLimits", "SchedulerStatistics", "StepOutput"]

_STATE_OF = {Finish.STOP: State.FINISHED_STOPPED, Finish.LENGTH: State.FINISHED_LENGTH}


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that the worker runs.

    Attributes:
        step: its number.
        slots: intp[n], who runs.
        counts: int64[n], how many tokens each.
        sampling: intp[k], those of `slots` that reach the end of their known tokens.
        is_uniform: every running request runs one token and samples one; if nobody joins or leaves, the next
            step is the same again.
        is_repeat: it is the same as the step before.
        version: of the table, when the step was decided.
    """

    step: int
    slots: Slots
    counts: Counts
    sampling: Slots
    is_uniform: bool
    is_repeat: bool
    version: int


class Scheduler:
    """All requests of one engine, from `add` to their last token.

    Call `schedule`, let a worker run the step, call `settle` with what it sampled, and so on. `add`, the
    aborts and `expire` may be called at any time between, also while a step runs.

    One step is in flight at a time. To overlap steps, `_flight` becomes a queue; `schedule` itself advances
    `num_computed` and, for a request that samples, `num_tokens` (its token is not known yet, but the worker
    has it); `settle` fills in the token ids and publishes what was advanced. What a step brought for a slot
    that was given up, or given to somebody else, after it was scheduled is told by `joined_step` and dropped
    already. Blocks may be given back while a step in flight still writes to them, provided that the worker
    runs steps in order: only settled blocks can be found, so nobody reads what is written there.

    Args:
        limits: sizes.
        hasher: hashes the blocks that generated tokens complete; frontends hash prompts with the same secret.
        policy: the order in which waiting requests get their turn: `fcfs`, `priority` or `fair`
            (streamserve.engine.scheduler.policy).
    """

    def __init__(self, limits: SchedulerLimits, hasher: BlockHasher, policy: str = "fcfs") -> None:
        self._limits = limits
        self._table = RequestTable(limits)
        self._queue = make_queue(policy, self._table)
        self._kv = KVCache(limits, hasher, self._table)
        self._growth = Growth(limits, self._table, self._kv, self._queue)
        self._admission = Admission(limits, self._table, self._kv, self._queue)
        self._requests: dict[tuple[int, int], Request] = {}
        self._deadlines = Deadlines()
        self._num_arrivals = 0
        self._num_expired = 0
        self._num_sampled = 0
        self._flight: _Flight | None = None
        self._last: _Flight | None = None
        self._step = 0

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits; exactly then `schedule` has something to run."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Takes in a new request, which waits for its turn.

        Raises:
            RequestFailed: the request can never run here (see the message); the frontend should have refused
                it. The scheduler has not changed and will not report it: the caller answers `Finish.ERROR`.
        """
        key = (request.frontend, request.stream)
        fault = why_impossible(request, self._limits)
        if fault is None and key in self._requests:
            fault = "a request of this name is here already"
        if fault is not None:
            raise RequestFailed(f"stream {request.stream} of frontend {request.frontend}: {fault}")
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        if not self._queue.heeds_priority:
            request.priority = 0
        self._requests[key] = request
        self._queue.push(request)
        if request.deadline_ns:
            self._deadlines.push(request)

    def abort(self, frontend: int, stream: int) -> bool:
        """Drops a request in whatever state; its slot and blocks are free at once. False if there is none."""
        request = self._requests.get((frontend, stream))
        if request is None:
            return False
        if request.state.is_queued:
            self._queue.remove(request)
            del self._requests[frontend, stream]
        else:
            assert request.slot is not None, request.state
            self._vacate(request.slot)
        request.move(State.FINISHED_ABORTED)
        return True

    def abort_frontend(self, frontend: int) -> int:
        """Drops all requests of a frontend that is gone; how many there were."""
        streams = [stream for owner, stream in self._requests if owner == frontend]
        return sum(self.abort(frontend, stream) for stream in streams)

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expire` will next have something to do, unless that request begins before; None for never."""
        return self._deadlines.next_ns

    def expire(self, now_ns: int) -> list[Request]:
        """Drops the requests that have not begun to run by their deadline, and returns them.

        Call it before `schedule` with the same wall clock that deadlines are in: then none begins too late.
        """
        expired = self._deadlines.pop(now_ns)
        for request in expired:
            self._queue.remove(request)
            del self._requests[request.frontend, request.stream]
            request.move(State.FINISHED_EXPIRED)
        self._num_expired += len(expired)
        return expired

    def schedule(self) -> StepDiff | None:
        """Decides the next step; None when there is nothing to run.

        When the step is the last one again, this costs a few vector operations, and Python only for the
        requests that need a block.
        """
        assert self._flight is None, f"step {self._step} has not been settled"
        last = self._last
        unchanged = last is not None and last.is_uniform and last.version == self._table.version
        if last is not None and unchanged and self._growth.grow_decodes():
            slots, counts = last.slots, last.counts
        else:
            last = None
            slots, counts = self._bring_forward()
        joins: list[Join] = []
        join_counts: list[int] = []
        if not self._growth.was_short:
            budget = self._limits.max_num_batched_tokens - int(counts.sum())
            is_shared = last is None and bool((counts > 1).any())
            joins, join_counts = self._admission.admit(budget, self._step + 1, is_shared=is_shared)
        if last is not None and not joins:
            return self._repeat(last)
        if len(slots) or joins:
            return self._launch(slots, counts, joins, join_counts)
        return None

    def take_begun(self) -> list[int]:
        """When the requests had arrived (wall clock, ns) that have begun to run since the last call."""
        begun = self._admission.begun_ns
        if begun:
            self._admission.begun_ns = []
        return begun

    def settle(self, result: StepResult) -> StepOutput:
        """Takes in a step's tokens: they are known now, full blocks findable, finished requests gone. Hot."""
        flight, table = self._flight, self._table
        assert flight is not None, f"no step is in flight, but {result.step} came back"
        assert flight.step == result.step, (flight.step, result.step)
        assert np.array_equal(flight.sampling, result.slots), (flight.sampling, result.slots)
        self._flight = None
        self._advance(flight)
        slots, token_ids, logprobs = flight.sampling, result.token_ids, result.logprobs
        if flight.version != table.version:
            # Somebody was aborted meanwhile: what was computed for them is for nobody.
            present = table.present(slots, flight.step)
            slots, token_ids = slots[present], token_ids[present]
            logprobs = None if logprobs is None else logprobs.rows(present)
        positions = table.num_tokens[slots]
        table.tokens[slots, positions] = token_ids
        table.num_tokens[slots] = positions + 1
        output = StepOutput(
            frontends=table.frontend[slots],
            streams=table.stream[slots],
            token_ids=token_ids,
            finish=table.stops.judge(slots, positions, token_ids),
            cached=None if flight.is_repeat else table.cached_if_first(slots, positions),
            logprobs=logprobs,
            num_top=None if logprobs is None else table.num_top[slots],
            prompt_logprobs=self._prompt_rows(flight, result) if result.prompt_logprobs else (),
        )
        self._num_sampled += len(slots)
        for row in np.flatnonzero(output.finish).tolist():
            self._vacate(int(slots[row])).move(_STATE_OF[Finish(output.finish[row])])
        return output

    def reset_prefix_cache(self) -> bool:
        """From now on only what is computed by requests that take a slot after this can be found.

        Requests that run keep their blocks and go on with them, but nobody will share what they computed or
        still compute. One that is preempted begins anew. False if prefix caching is off.
        """
        self._kv.reset()
        return self._kv.caches_prefixes

    def statistics(self) -> SchedulerStatistics:
        """Gauges and counters as of now."""
        return SchedulerStatistics(
            running=self._table.num_running,
            waiting=len(self._queue),
            num_blocks=self._kv.pool.num_blocks,
            free_blocks=self._kv.pool.num_free,
            prefix_queries=self._admission.prefix_queries,
            prefix_hits=self._admission.prefix_hits,
            preemptions=self._growth.num_preemptions,
            expired=self._num_expired,
            prompt_tokens=self._admission.prompt_tokens,
            generation_tokens=self._num_sampled,
        )

    def check_integrity(self) -> None:
        """Asserts every invariant; takes time in the order of the number of blocks. For tests."""
        self._table.check_integrity()
        self._kv.check_integrity()
        queued = list(self._queue)
        assert len(queued) == len(set(queued)) == len(self._queue), queued
        running = [request for request in self._table.requests if request is not None]
        for requests, is_queued in ((queued, True), (running, False)):
            assert all(request.state.is_queued == is_queued for request in requests), requests
        assert set(self._requests.values()) == {*queued, *running}
        assert len(self._requests) == len(queued) + len(running)

    def _bring_forward(self) -> tuple[Slots, Counts]:
        """The running requests and how many tokens each of them runs, after those who had to give way.

        Each runs one token at least (streamserve.engine.scheduler.sharing). The budget has that many: another
        is let in only when it has something left beyond what the running ones run.
        """
        limits, table = self._limits, self._table
        slots = table.order
        counts = table.num_tokens[slots] - table.num_computed[slots]
        if limits.long_prefill_token_threshold:
            counts = np.minimum(counts, limits.long_prefill_token_threshold)
        counts = share_budget(counts, limits.max_num_batched_tokens, keeps_seat=self._admission.is_open)
        slots, counts = self._growth.grow(slots, counts)
        assert counts.all(), (slots, counts)
        return slots, counts

    def _launch(self, slots: Slots, counts: Counts, joins: list[Join], join_counts: list[int]) -> StepDiff:
        """The step is decided: notes it for `settle`, and words it for the worker."""
        table = self._table
        slots = np.concatenate([slots, np.array([join.slot for join in joins], dtype=np.intp)])
        counts = np.concatenate([counts, np.array(join_counts, dtype=np.int64)])
        samples = table.num_computed[slots] + counts == table.num_tokens[slots]
        is_uniform = bool((counts == 1).all() and samples.all())
        self._step += 1
        self._last = self._flight = _Flight(
            self._step, slots, counts, slots[samples], is_uniform, is_repeat=False, version=table.version
        )
        return StepDiff(
            step=self._step,
            leaves=table.take_leaves(),
            joins=joins,
            append_slots=self._growth.append_slots,
            append_blocks=self._growth.append_blocks,
            slots=slots.astype(np.int32),
            num_tokens=counts.astype(np.int32),
        )

    def _repeat(self, last: _Flight) -> StepDiff:
        """`_launch` for the step `last` once more; nobody has joined or left. Hot."""
        self._step += 1
        self._last = self._flight = _Flight(
            self._step, last.slots, last.counts, last.sampling, True, is_repeat=True, version=last.version
        )
        return StepDiff(
            step=self._step,
            append_slots=self._growth.append_slots,
            append_blocks=self._growth.append_blocks,
        )

    def _advance(self, flight: _Flight) -> None:
        """The tokens of the step are computed; blocks that they filled can be found from now on. Hot."""
        table = self._table
        slots, counts = flight.slots, flight.counts
        if flight.version != table.version:
            present = table.present(slots, flight.step)
            slots, counts = slots[present], counts[present]
        before = table.num_computed[slots]
        after = before + counts
        table.num_computed[slots] = after
        if self._kv.caches_prefixes:
            self._kv.publish(slots, before, after)

    def _prompt_rows(self, flight: _Flight, result: StepResult) -> list[PromptRows]:
        """What the step brought of prompts' log probabilities, without what was reported before.

        A request that was preempted computes its prompt again, and the worker does not know what of it was
        reported.
        """
        parts: list[PromptRows] = []
        for part in result.prompt_logprobs:
            if self._table.joined_step[part.slot] > flight.step:
                continue
            request = self._table.requests[part.slot]
            assert request is not None, f"slot {part.slot} is free"
            start, end = request.next_prompt_logprob, part.start + len(part.logprobs.chosen)
            if end > start:
                assert part.start <= start, (part.start, start)
                assert end <= request.num_prompt, (end, request.num_prompt)
                rows = part.logprobs.rows(slice(start - part.start, None), request.params.prompt_logprobs)
                parts.append(PromptRows(request.frontend, request.stream, start, rows))
                request.next_prompt_logprob = end
        return parts

    def _vacate(self, slot: int) -> Request:
        """Takes a request that is over out of everything."""
        self._kv.release(slot)
        self._queue.left(slot)
        request = self._table.leave(slot)
        del self._requests[request.frontend, request.stream]
        return request
