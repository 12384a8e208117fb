"""EngineCore: one step of the engine, from the requests that came in to the tokens that go out."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.engine.executor.base import Executor
from streamserve.engine.meter import StepMeter
from streamserve.engine.outbox import Outbox
from streamserve.engine.scheduler.scheduler import Scheduler, StepOutput
from streamserve.engine.scheduler.states import Request
from streamserve.engine.step import StepDiff
from streamserve.errors import InvalidRequest, RequestFailed
from streamserve.ipc.ring import RingReader
from streamserve.messages import (
    AddRequest,
    Finish,
    Kind,
    Logprobs,
    StepTokens,
    decode_abort,
    decode_add,
    decode_call,
    epoch_of,
    stream_of_add,
)

logger = logging.getLogger(__name__)

_DECODERS: dict[Kind, Callable[[memoryview], Any]] = {
    Kind.ADD: decode_add,
    Kind.ABORT: decode_abort,
    Kind.CALL: decode_call,
}
_BROKEN_FRAME = (struct.error, ValueError, KeyError, TypeError, AttributeError, InvalidRequest)

Rows = slice | npt.NDArray[np.bool_] | npt.NDArray[np.intp]


class EngineCore:
    """Admits what the request rings bring, schedules, executes, and settles.

    Args:
        scheduler: decides what runs.
        executor: runs it.
        inboxes: the request ring of each frontend.
        outboxes: the way back to each of them, in the same order.
        epoch: this engine start; frames of another one are dropped.
        wall_clock_ns: ns since 1970, for deadlines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        inboxes: Sequence[RingReader],
        outboxes: Sequence[Outbox],
        epoch: int,
        *,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._inboxes = inboxes
        self._outboxes = outboxes
        self._epoch = epoch
        self._wall_clock_ns = wall_clock_ns
        self._num_steps = 0
        self._num_step_tokens = 0
        self._meter = StepMeter()

    def step(self) -> bool:
        """Runs one step. False when there was nothing to run. Hot."""
        began_ns = time.perf_counter_ns()
        self.admit()
        self._expire()
        diff = self._scheduler.schedule()
        if diff is None:
            return False
        for arrival_ns in self._scheduler.take_begun():
            self._meter.record_begin(self._wall_clock_ns() - arrival_ns)
        scheduled_ns = time.perf_counter_ns()
        result = self._executor.execute(diff)
        executed_ns = time.perf_counter_ns()
        self._deliver(self._scheduler.settle(result))
        self._num_steps += 1
        settled_ns = time.perf_counter_ns()
        self._meter.record(
            self._count_tokens(diff),
            scheduled_ns - began_ns,
            executed_ns - scheduled_ns,
            settled_ns - executed_ns,
        )
        return True

    def admit(self) -> None:
        """Takes in everything that the frontends sent since the last step."""
        for frontend, inbox in enumerate(self._inboxes):
            while messages := inbox.read():
                for kind, payload in messages:
                    self._handle(frontend, kind, payload)
                del messages, payload
                inbox.release()

    def abort_frontend(self, frontend: int) -> int:
        """Drops all requests of a frontend that is gone; how many there were."""
        return self._scheduler.abort_frontend(frontend)

    def seconds_to_deadline(self) -> float | None:
        """How long nothing needs to be done if nothing comes in; None for as long as one likes."""
        deadline_ns = self._scheduler.next_deadline_ns
        return None if deadline_ns is None else max(0.0, (deadline_ns - self._wall_clock_ns()) / 1e9)

    def statistics(self) -> dict[str, int]:
        """The numbers of a STATS frame (streamserve.messages)."""
        return asdict(self._scheduler.statistics()) | self._meter.numbers()

    def _handle(self, frontend: int, kind: int, payload: memoryview) -> None:
        # Frontends send only valid frames; should one be broken all the same, it costs that request alone.
        # What happens after it was read is this engine's own doing, and a fault there is not survived.
        try:
            if epoch_of(payload) != self._epoch:
                return
            command = _DECODERS[Kind(kind)](payload)
        except _BROKEN_FRAME as error:
            logger.error("a frame of kind %d from frontend %d cannot be read: %s", kind, frontend, error)
            if kind == Kind.ADD and (stream := stream_of_add(payload)) is not None:
                self._end(frontend, [stream], Finish.ERROR)
            return
        if kind == Kind.ADD:
            self._add(frontend, command)
        elif kind == Kind.ABORT:
            for stream in command:
                self._scheduler.abort(frontend, stream)
        else:
            call_id, body = command
            try:
                self._call(frontend, call_id, body)
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                logger.error("a call from frontend %d cannot be carried out: %r", frontend, error)
                self._outboxes[frontend].reply(call_id, {"ok": False, "error": "malformed call"})

    def _add(self, frontend: int, request: AddRequest) -> None:
        try:
            self._scheduler.add(Request(frontend, request))
        except RequestFailed as error:
            logger.warning("refused: %s", error)
            self._end(frontend, [request.stream], Finish.ERROR)

    def _call(self, frontend: int, call_id: int, body: dict[str, Any]) -> None:
        outbox = self._outboxes[frontend]
        method = body.get("method")
        if method == "ping":
            outbox.reply(call_id, {"ok": True, "stats": self.statistics()})
        elif method == "reset_prefix_cache":
            outbox.reply(call_id, {"ok": self._scheduler.reset_prefix_cache()})
        elif method == "relay":
            self._relay(frontend, call_id, body["body"])
        elif method == "relay_reply":
            self._outboxes[body["to"]].reply(body["call_id"], {"answer": body["body"]})
        else:
            outbox.reply(call_id, {"ok": False, "error": f"unknown method {method!r}"})

    def _relay(self, origin: int, call_id: int, body: Any) -> None:
        """Hands what one frontend asks to the others, whose answers find back by `relay_reply`."""
        others = [outbox for frontend, outbox in enumerate(self._outboxes) if frontend != origin]
        self._outboxes[origin].reply(call_id, {"asked": len(others)})
        for outbox in others:
            outbox.relay(call_id, {"origin": origin, "body": body})

    def _expire(self) -> None:
        """Ends what has waited too long, before it could be scheduled. Costs nothing without deadlines."""
        if self._scheduler.next_deadline_ns is None:
            return
        expired = self._scheduler.expire(self._wall_clock_ns())
        expired.sort(key=_frontend_of)
        for frontend, requests in groupby(expired, key=_frontend_of):
            self._end(frontend, [request.stream for request in requests], Finish.EXPIRED)

    def _count_tokens(self, diff: StepDiff) -> int:
        """Tokens that the step runs; a step that says nothing of them is like the one before."""
        if diff.num_tokens is not None:
            self._num_step_tokens = int(diff.num_tokens.sum())
        return self._num_step_tokens

    def _deliver(self, output: StepOutput) -> None:
        """Routes one step's tokens to the frontends, as array slices. Hot."""
        for part in output.prompt_logprobs:
            self._outboxes[part.frontend].prompt_logprobs(part.stream, part.start, part.logprobs)
        for frontend, outbox in enumerate(self._outboxes):
            rows = slice(None) if len(self._outboxes) == 1 else output.frontends == frontend
            if output.logprobs is None or output.num_top is None:
                self._send_rows(outbox, output, rows)
            else:
                self._send_rows_apart(outbox, output, rows, output.logprobs, output.num_top)

    def _send_rows(
        self, outbox: Outbox, output: StepOutput, rows: Rows, logprobs: Logprobs | None = None
    ) -> None:
        streams, finish = output.streams[rows], output.finish[rows]
        if len(streams):
            outbox.step(
                StepTokens(
                    step=self._num_steps,
                    streams=streams,
                    tokens=output.token_ids[rows],
                    finish=finish if finish.any() else None,
                    cached=None if output.cached is None else output.cached[rows],
                    logprobs=logprobs,
                )
            )

    def _send_rows_apart(
        self,
        outbox: Outbox,
        output: StepOutput,
        rows: Rows,
        logprobs: Logprobs,
        num_top: npt.NDArray[np.int32],
    ) -> None:
        """Those that asked for log probabilities in one frame and the others in another.

        Log probabilities can be forty times the size of a token: one that asks must not make all others as
        large.
        """
        mine = np.arange(len(num_top))[rows]
        asking = num_top[mine] >= 0
        self._send_rows(outbox, output, mine[~asking])
        asked = mine[asking]
        if len(asked):
            self._send_rows(outbox, output, asked, logprobs.rows(asked, int(num_top[asked].max())))

    def _end(self, frontend: int, streams: Sequence[int], finish: Finish) -> None:
        """Tells a frontend that streams end without a token."""
        self._outboxes[frontend].step(
            StepTokens(
                step=self._num_steps,
                streams=np.array(streams, dtype=np.uint64),
                counts=np.zeros(len(streams), dtype=np.uint32),
                finish=np.full(len(streams), finish, dtype=np.uint8),
                tokens=np.zeros(0, dtype=np.int32),
            )
        )


def _frontend_of(request: Request) -> int:
    return request.frontend
