"""EngineCore: one step of the engine, from the requests that came in to the tokens that go out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamserve.engine.executor.base import Executor
from streamserve.engine.outbox import Outbox
from streamserve.engine.scheduler.scheduler import Scheduler, StepOutput
from streamserve.engine.scheduler.states import Request
from streamserve.errors import RequestFailed
from streamserve.ipc.ring import RingReader
from streamserve.messages import (
    Finish,
    Kind,
    StepTokens,
    decode_abort,
    decode_add,
    decode_call,
    epoch_of,
    stream_of_add,
)

logger = logging.getLogger(__name__)


class EngineCore:
    """Admits what the request rings bring, schedules, executes, and settles.

    Args:
        scheduler: decides what runs.
        executor: runs it.
        inboxes: the request ring of each frontend.
        outboxes: the way back to each of them, in the same order.
        epoch: this engine start; frames of another one are dropped.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        inboxes: Sequence[RingReader],
        outboxes: Sequence[Outbox],
        epoch: int,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._inboxes = inboxes
        self._outboxes = outboxes
        self._epoch = epoch
        self._num_steps = 0
        self._ones = np.ones(0, dtype=np.uint32)

    def step(self) -> bool:
        """Runs one step. False when there was nothing to run. Hot."""
        self.admit()
        diff = self._scheduler.schedule()
        if diff is not None:
            result = self._executor.execute(diff)
            self._deliver(self._scheduler.settle(result))
            self._num_steps += 1
        return diff is not None

    def admit(self) -> None:
        """Takes in everything that the frontends sent since the last step."""
        for frontend, inbox in enumerate(self._inboxes):
            while messages := inbox.read():
                for kind, payload in messages:
                    self._handle(frontend, kind, payload)
                del messages, payload
                inbox.release()

    def statistics(self) -> dict[str, Any]:
        """The numbers of a STATS frame."""
        stats = self._scheduler.statistics()
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "num_blocks": stats.num_blocks,
            "free_blocks": stats.free_blocks,
            "prefix_queries": stats.prefix_queries,
            "prefix_hits": stats.prefix_hits,
            "preemptions": stats.preemptions,
            "steps": self._num_steps,
        }

    def _handle(self, frontend: int, kind: int, payload: memoryview) -> None:
        # Frontends send only valid frames; should one be broken all the same, it costs that request alone.
        try:
            if epoch_of(payload) != self._epoch:
                return
            if kind == Kind.ADD:
                self._scheduler.add(Request(frontend, decode_add(payload)))
            elif kind == Kind.ABORT:
                for stream in decode_abort(payload):
                    self._scheduler.abort(frontend, stream)
            elif kind == Kind.CALL:
                self._call(frontend, *decode_call(payload))
        except RequestFailed as error:
            logger.warning("refused: %s", error)
            self._fail(frontend, stream_of_add(payload))
        except Exception:
            logger.exception("a frame of kind %d from frontend %d could not be handled", kind, frontend)
            if kind == Kind.ADD:
                self._fail(frontend, stream_of_add(payload))

    def _call(self, frontend: int, call_id: int, body: dict[str, Any]) -> None:
        outbox = self._outboxes[frontend]
        method = body.get("method")
        if method == "ping":
            outbox.stats(self.statistics())
            outbox.reply(call_id, {"ok": True})
        elif method == "reset_prefix_cache":
            outbox.reply(call_id, {"ok": self._scheduler.reset_prefix_cache()})
        else:
            outbox.reply(call_id, {"ok": False, "error": f"unknown method {method!r}"})

    def _deliver(self, output: StepOutput) -> None:
        """Routes one step's tokens to the frontends, as array slices. Hot."""
        if len(output.streams) > len(self._ones):
            self._ones = np.ones(2 * len(output.streams), dtype=np.uint32)
        for frontend, outbox in enumerate(self._outboxes):
            rows = slice(None) if len(self._outboxes) == 1 else output.frontends == frontend
            streams = output.streams[rows]
            if len(streams):
                outbox.step(
                    StepTokens(
                        step=self._num_steps,
                        streams=streams,
                        counts=self._ones[: len(streams)],
                        finish=output.finish[rows],
                        tokens=output.token_ids[rows],
                        cached=None if output.cached is None else output.cached[rows],
                    )
                )

    def _fail(self, frontend: int, stream: int) -> None:
        self._outboxes[frontend].step(
            StepTokens(
                step=self._num_steps,
                streams=np.array([stream], dtype=np.uint64),
                counts=np.zeros(1, dtype=np.uint32),
                finish=np.array([Finish.ERROR], dtype=np.uint8),
                tokens=np.zeros(0, dtype=np.int32),
            )
        )
