"""Scheduler: which requests run how many tokens in the next step, and what came of the last one.

There is no prefill and no decode here. A request has known tokens (prompt and output so far) and computed
ones; a step brings it forward by some tokens under a budget shared by all. When it has caught up, the worker
samples one more. Prompts in chunks, prefix hits, resumed and preempted requests are all the same to it.

The usual step, where every running request decodes one token, is a few vector operations: only requests that
need a block, join, leave or are cut short are touched one by one.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from streamserve.engine.scheduler.admission import Admission, why_impossible
from streamserve.engine.scheduler.deadlines import Deadlines
from streamserve.engine.scheduler.flight import Flight
from streamserve.engine.scheduler.growth import Growth
from streamserve.engine.scheduler.kv_cache import KVCache
from streamserve.engine.scheduler.limits import SchedulerLimits
from streamserve.engine.scheduler.output import (
    PromptRows,
    SchedulerStatistics,
    StepMix,
    StepOutput,
)
from streamserve.engine.scheduler.policy import make_queue
from streamserve.engine.scheduler.quarantine import QuarantineQueue
from streamserve.engine.scheduler.sharing import UNPACED, Pace, pace_documents, share_budget
from streamserve.engine.scheduler.states import Request, State
from streamserve.engine.scheduler.table import Counts, RequestTable, Slots
from streamserve.engine.step import Join, StepDiff, StepResult
from streamserve.errors import RequestFailed
from streamserve.hashing import BlockHasher
from streamserve.messages import Finish

__all__ = ["Scheduler", "SchedulerLimits", "SchedulerStatistics", "StepOutput"]

_STATE_OF = {Finish.STOP: State.FINISHED_STOPPED, Finish.LENGTH: State.FINISHED_LENGTH}


class Scheduler:
    """All requests of one engine, from `add` to their last token.

    Call `schedule`, let a worker run the step, call `settle` with what it sampled, and so on. `add`, the
    aborts and `expire` may be called at any time between, also while a step runs.

    Steps may overlap: `schedule` can be called again before the last step is settled, as long as a worker
    runs them in order and they are settled in order. A token that has been sampled and is not known here yet
    counts as known (the worker has it, and that is who reads it), so a request goes on without it. That it
    was the last one by its length is known all the same; that it was a stop token turns out one step late,
    and what the step after it brought is dropped (`joined_step` tells). Blocks may be given back while a step
    in flight still writes to them: only settled blocks can be found, so nobody reads what is written there.
    When memory is short, what is in flight settles before anybody is preempted.

    Args:
        limits: sizes.
        hasher: hashes the blocks that generated tokens complete; frontends hash prompts with the same secret.
        policy: the order in which waiting requests get their turn: `fcfs`, `priority` or `fair`
            (streamserve.engine.scheduler.policy).

    Attributes:
        mix: what the step consists of that was scheduled last.
    """

    def __init__(self, limits: SchedulerLimits, hasher: BlockHasher, policy: str = "fcfs") -> None:
        self._limits = limits
        self._table = RequestTable(limits)
        self._queue = QuarantineQueue(make_queue(policy, self._table), self._table)
        self._kv = KVCache(limits, hasher, self._table)
        self._growth = Growth(limits, self._table, self._kv, self._queue)
        self._admission = Admission(limits, self._table, self._kv, self._queue)
        self._requests: dict[tuple[int, int], Request] = {}
        self._deadlines = Deadlines()
        self._num_arrivals = 0
        self._num_expired = 0
        self._num_sampled = 0
        self.mix = StepMix(0, 0, 0, 0)
        self._flights: deque[Flight] = deque()
        self._last: Flight | None = None
        self._step = 0

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits; with nothing in flight, `schedule` has something to run then."""
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

    def schedule(self, pace: Pace = UNPACED) -> StepDiff | None:
        """Decides the next step; None when there is nothing to run, or nothing before a step is settled.

        When the step is the last one again, this costs a few vector operations, and Python only for the
        requests that need a block.

        Args:
            pace: how much may be read beside others, but for the first token of who comes in.
        """
        if self._queue.is_crowded:
            if self._flights:
                return None
            self._growth.preempt_all()
        last = self._last
        unchanged = last is not None and last.repeats > 0 and last.version == self._table.version
        if last is not None and unchanged and self._growth.grow_decodes():
            slots, counts = last.slots, None
            num_running_tokens = num_decodes = len(slots)
        else:
            last = None
            forward = self._bring_forward(pace)
            if forward is None:
                return None
            slots, counts = forward
            num_running_tokens, num_decodes = int(counts.sum()), int(np.count_nonzero(counts == 1))
        joins: list[Join] = []
        join_counts: list[int] = []
        if not self._growth.was_short:
            budget = pace.budget(self._limits.max_num_batched_tokens, num_decodes)
            joins, join_counts = self._admission.admit(
                budget,
                budget - num_running_tokens,
                self._step + 1,
                is_shared=num_running_tokens > len(slots),
                document_tokens=pace.document_tokens if len(slots) else None,
            )
        if last is not None and not joins:
            return self._repeat(last)
        if len(slots) or joins:
            return self._launch(slots, counts, joins, join_counts)
        return None

    def take_begun(self) -> list[Request]:
        """The requests that have begun to run since the last call."""
        begun = self._admission.begun
        if begun:
            self._admission.begun = []
        return begun

    def settle(self, result: StepResult) -> StepOutput:
        """Takes in a step's tokens: they are known now, full blocks findable, finished requests gone. Hot."""
        assert self._flights, f"no step is in flight, but {result.step} came back"
        flight, table = self._flights[0], self._table
        assert flight.step == result.step, (flight.step, result.step)
        assert np.array_equal(flight.sampling, result.slots), (flight.sampling, result.slots)
        self._flights.popleft()
        self._publish(flight)
        slots, positions = flight.sampling, flight.positions
        token_ids, logprobs = result.token_ids, result.logprobs
        if flight.version != table.version:
            # Somebody has left meanwhile: what was computed for them is for nobody.
            present = table.present(slots, flight.step)
            slots, positions, token_ids = slots[present], positions[present], token_ids[present]
            logprobs = None if logprobs is None else logprobs.rows(present)
        table.tokens[slots, positions] = token_ids
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
        if self._queue.on_trial is not None:
            self._queue.acquit(len(self._flights))
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
        assert self._flights or (self._table.num_tokens < self._table.stops.limit)[self._table.order].all()

    def _bring_forward(self, pace: Pace) -> tuple[Slots, Counts] | None:
        """The running requests and how many tokens each of them runs, after those who had to give way.

        Those that decode run one, the others what the budget has for them
        (streamserve.engine.scheduler.sharing). It has a token for each, or nobody more had been let in.
        None if somebody would have to give way while steps are in flight: they may bring the end of somebody.
        """
        limits, table = self._limits, self._table
        slots = table.order
        if self._flights:
            # Whose last token is in flight has nothing left to run.
            slots = slots[table.num_tokens[slots] < table.stops.limit[slots]]
        counts = table.num_tokens[slots] - table.num_computed[slots]
        documents = table.is_document[slots] & (counts > 1)
        if limits.long_prefill_token_threshold:
            counts = np.minimum(counts, limits.long_prefill_token_threshold)
        budget = pace.budget(limits.max_num_batched_tokens, int(np.count_nonzero(counts == 1)))
        if pace.document_tokens is not None:
            # None at all where the step is for those who decode.
            most = 0 if pace.prompt_tokens == 0 else pace.document_tokens
            counts = pace_documents(counts, documents, most)
        counts = share_budget(counts, budget, keeps_seat=self._admission.is_open)
        grown = self._growth.grow(slots, counts, may_preempt=not self._flights)
        if grown is None:
            return None
        slots, counts = grown
        runs = counts > 0
        if len(slots) and not runs.any():
            # All that were to run had to give way, to some that were not: the step is for these now.
            return self._bring_forward(pace)
        return grown if runs.all() else (slots[runs], counts[runs])

    def _launch(
        self, slots: Slots, counts: Counts | None, joins: list[Join], join_counts: list[int]
    ) -> StepDiff:
        """The step is decided: notes it for `settle`, and words it for the worker.

        Args:
            slots: the running requests that run.
            counts: how many tokens each of them runs; None for one.
            joins, join_counts: those who come in, and how many tokens each of them runs.
        """
        table = self._table
        if counts is None:
            counts = np.ones(len(slots), dtype=np.int64)
        slots = np.concatenate([slots, np.array([join.slot for join in joins], dtype=np.intp)])
        counts = np.concatenate([counts, np.array(join_counts, dtype=np.int64)])
        before, known = table.num_computed[slots], table.num_tokens[slots]
        after = before + counts
        samples = after == known
        repeats = 0
        if (counts == 1).all() and samples.all() and len(slots) == table.num_running:
            repeats = int((table.stops.limit[slots] - known).min()) - 1
        self._step += 1
        flight = Flight(
            step=self._step,
            slots=slots,
            before=before,
            after=after,
            sampling=slots[samples],
            positions=known[samples],
            is_repeat=False,
            repeats=repeats,
            version=table.version,
        )
        self.mix = self._mix(slots, counts, samples)
        self._take_off(flight)
        return StepDiff(
            step=self._step,
            leaves=table.take_leaves(),
            joins=joins,
            append_slots=self._growth.append_slots,
            append_blocks=self._growth.append_blocks,
            slots=slots.astype(np.int32),
            num_tokens=counts.astype(np.int32),
        )

    def _mix(self, slots: Slots, counts: Counts, samples: npt.NDArray[np.bool_]) -> StepMix:
        decodes = samples & (counts == 1)
        documents = self._table.is_document[slots] & ~decodes
        num_tokens, num_decodes = int(counts.sum()), int(np.count_nonzero(decodes))
        num_document_tokens = int(counts[documents].sum())
        return StepMix(
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            num_prompt_tokens=num_tokens - num_decodes - num_document_tokens,
            num_document_tokens=num_document_tokens,
        )

    def _repeat(self, last: Flight) -> StepDiff:
        """`_launch` for the step `last` once more; nobody has joined or left. Hot."""
        self._step += 1
        self._take_off(last.again())
        return StepDiff(
            step=self._step,
            append_slots=self._growth.append_slots,
            append_blocks=self._growth.append_blocks,
        )

    def _take_off(self, flight: Flight) -> None:
        """For all that follows the step is done: its tokens are computed, what it samples is known. Hot."""
        self._last = flight
        self._flights.append(flight)
        self._table.num_computed[flight.slots] = flight.after
        self._table.num_tokens[flight.sampling] = flight.positions + 1

    def _publish(self, flight: Flight) -> None:
        """The tokens of the step are computed: blocks that they filled can be found from now on. Hot."""
        if not self._kv.caches_prefixes:
            return
        slots, before, after = flight.slots, flight.before, flight.after
        if flight.version != self._table.version:
            present = self._table.present(slots, flight.step)
            slots, before, after = slots[present], before[present], after[present]
        self._kv.publish(slots, before, after)

    def _prompt_rows(self, flight: Flight, result: StepResult) -> list[PromptRows]:
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
