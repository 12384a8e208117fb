"""EngineCore: one step of the engine, from the requests that came in to the tokens that go out."""

from __future__ import annotations

import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.engine.executor.base import PendingStep, StepRunner
from streamserve.engine.meter import StepMeter
from streamserve.engine.outbox import Outbox
from streamserve.engine.pacing import StepPacer
from streamserve.engine.scheduler.output import StepMix, StepOutput
from streamserve.engine.scheduler.scheduler import Scheduler
from streamserve.engine.scheduler.states import Request
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
    decode_handover,
    epoch_of,
    stream_of_add,
)

logger = logging.getLogger(__name__)

_DECODERS: dict[Kind, Callable[[memoryview], Any]] = {
    Kind.ADD: decode_add,
    Kind.ABORT: decode_abort,
    Kind.CALL: decode_call,
    Kind.HANDOVER: decode_handover,
}
_BROKEN_FRAME = (struct.error, ValueError, KeyError, TypeError, AttributeError, InvalidRequest)

Rows = slice | npt.NDArray[np.bool_] | npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that workers run: what it consists of, and when it was handed to them."""

    pending: PendingStep
    mix: StepMix
    submitted_ns: int


class EngineCore:
    """Admits what the request rings bring, schedules, executes, and settles.

    Args:
        scheduler: decides what runs.
        executor: runs it.
        inboxes: the request ring of each frontend.
        outboxes: the way back to each of them, in the same order.
        epoch: this engine start; frames of another one are dropped.
        pacer: how much of prompts is read while others decode; None for no limit.
        wall_clock_ns: ns since 1970, for deadlines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepRunner,
        inboxes: Sequence[RingReader],
        outboxes: Sequence[Outbox],
        epoch: int,
        *,
        pacer: StepPacer | None = None,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._inboxes = inboxes
        self._outboxes = outboxes
        self._epoch = epoch
        self._wall_clock_ns = wall_clock_ns
        self._in_flight: deque[_InFlight] = deque()
        self._executed_ns = 0
        self._num_steps = 0
        self._meter = StepMeter()
        self._pacer = StepPacer() if pacer is None else pacer

    def step(self) -> bool:
        """Launches as many steps as may be in flight, and takes in the first of them. Hot.

        False when there was nothing to run.
        """
        began_ns = time.perf_counter_ns()
        self.admit()
        self._expire()
        self._launch()
        if not self._in_flight:
            return False
        launched_ns = time.perf_counter_ns()
        step = self._in_flight.popleft()
        result = step.pending.result()
        executed_ns = time.perf_counter_ns()
        self._deliver(self._scheduler.settle(result))
        self._num_steps += 1
        settled_ns = time.perf_counter_ns()
        self._meter.record(
            step.mix.num_tokens, launched_ns - began_ns, executed_ns - launched_ns, settled_ns - executed_ns
        )
        # A step that was submitted behind another began when that one ended.
        self._pacer.record((executed_ns - max(step.submitted_ns, self._executed_ns)) / 1e9, step.mix)
        self._executed_ns = executed_ns
        return True

    def admit(self) -> None:
        """Takes in everything that the frontends sent since the last step."""
        for frontend, inbox in enumerate(self._inboxes):
            while messages := inbox.read():
                for kind, payload in messages:
                    self._handle(frontend, kind, payload)
                del messages, payload
                inbox.release()

    def work_ahead(self) -> bool:
        """Has workers use the time while there is nothing to run; False if they have nothing to do either."""
        return self._executor.work_ahead()

    def seconds_to_deadline(self) -> float | None:
        """How long nothing needs to be done if nothing comes in; None for as long as one likes."""
        deadline_ns = self._scheduler.next_deadline_ns
        return None if deadline_ns is None else max(0.0, (deadline_ns - self._wall_clock_ns()) / 1e9)

    def statistics(self) -> dict[str, int]:
        """The numbers of a STATS frame (streamserve.messages)."""
        return {
            **asdict(self._scheduler.statistics()),
            **self._meter.numbers(),
            **self._executor.statistics(),
        }

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
        elif kind == Kind.HANDOVER:
            self._hand_over(frontend, command)
        else:
            call_id, body = command
            try:
                self._call(frontend, call_id, body)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                logger.error("a call from frontend %d cannot be carried out: %r", frontend, error)
                self._outboxes[frontend].reply(call_id, {"ok": False, "error": "malformed call"})

    def _add(self, frontend: int, request: AddRequest) -> None:
        try:
            self._scheduler.add(Request(frontend, request))
        except RequestFailed as error:
            logger.warning("a request of frontend %d is refused: %s", frontend, error)
            self._end(frontend, [request.stream], Finish.ERROR)

    def _hand_over(self, frontend: int, incarnation: int) -> None:
        """The frontend died: drops all that it asked for. What comes from now on is of its successor."""
        num_aborted = self._scheduler.abort_frontend(frontend)
        logger.warning("frontend %d is gone, and %d requests with it", frontend, num_aborted)
        self._outboxes[frontend].reset(incarnation)

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
            self._relay_reply(body["to"], body["call_id"], body["body"])
        else:
            outbox.reply(call_id, {"ok": False, "error": f"unknown method {method!r}"})

    def _relay(self, origin: int, call_id: int, body: Any) -> None:
        """Hands what one frontend asks to the others, whose answers find back by `relay_reply`."""
        others = [outbox for frontend, outbox in enumerate(self._outboxes) if frontend != origin]
        self._outboxes[origin].reply(call_id, {"asked": len(others)})
        for outbox in others:
            outbox.relay(call_id, {"origin": (origin, self._outboxes[origin].incarnation), "body": body})

    def _relay_reply(self, origin: tuple[int, int], call_id: int, body: Any) -> None:
        frontend, incarnation = origin
        outbox = self._outboxes[frontend]
        # A successor of the one that asked has calls of its own under the same ids.
        if outbox.incarnation == incarnation:
            outbox.reply(call_id, {"answer": body})

    def _expire(self) -> None:
        """Ends what has waited too long, before it could be scheduled. Costs nothing without deadlines."""
        if self._scheduler.next_deadline_ns is None:
            return
        expired = self._scheduler.expire(self._wall_clock_ns())
        expired.sort(key=_frontend_of)
        for frontend, requests in groupby(expired, key=_frontend_of):
            self._end(frontend, [request.stream for request in requests], Finish.EXPIRED)

    def _announce(self, begun: list[Request]) -> None:
        """Tells the frontends which of their requests have begun to run just now."""
        moment_ns = time.monotonic_ns()
        begun.sort(key=_frontend_of)
        for frontend, requests in groupby(begun, key=_frontend_of):
            self._outboxes[frontend].begun([request.stream for request in requests], moment_ns)

    def _launch(self) -> None:
        """Decides steps and hands them to the workers, until enough are in flight. Hot."""
        while len(self._in_flight) < self._executor.depth:
            diff = self._scheduler.schedule(self._pacer.pace())
            if diff is None:
                return
            if begun := self._scheduler.take_begun():
                self._announce(begun)
            submitted_ns = time.perf_counter_ns()
            self._in_flight.append(_InFlight(self._executor.submit(diff), self._scheduler.mix, submitted_ns))

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
