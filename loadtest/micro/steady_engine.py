"""An EngineCore with its rings in one process, in which requests decode on and on."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from streamserve.engine.core import EngineCore
from streamserve.engine.executor.base import StepRunner
from streamserve.engine.outbox import Outbox
from streamserve.engine.pacing import StepPacer
from streamserve.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from streamserve.hashing import BlockHasher
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment
from streamserve.messages import AddRequest, Kind, encode_add
from streamserve.sampling import SamplingParams

BLOCK_SIZE = 16
RING_BYTES = 1 << 22
EPOCH = 1


class SteadyEngine:
    """`num_seqs` requests that decode on and on, and a frontend that throws all away.

    Args:
        num_seqs: requests.
        executor: started.
        limits: of the scheduler.
        pacer: see `EngineCore`.
    """

    def __init__(
        self, num_seqs: int, executor: StepRunner, limits: SchedulerLimits, *, pacer: StepPacer | None = None
    ) -> None:
        self.scheduler = Scheduler(limits, BlockHasher(b"b" * 32, BLOCK_SIZE))
        self._max_model_len = limits.max_model_len
        self._bell = Doorbell.create()
        self._segments = [Segment.create(name, ring_bytes(RING_BYTES)) for name in ("requests", "deltas")]
        for segment in self._segments:
            format_ring(segment.view, RING_BYTES)
        requests, deltas = (segment.view for segment in self._segments)
        self._frontend = RingReader(deltas, self._bell)
        self._requests = RingWriter(requests, self._bell)
        self._core = EngineCore(
            self.scheduler,
            executor,
            [RingReader(requests, self._bell)],
            [Outbox(RingWriter(deltas, self._bell), EPOCH)],
            EPOCH,
            pacer=pacer,
        )
        self._num_added = 0
        rng = np.random.default_rng(0)
        for stream in range(num_seqs):
            # As many requests stand at each place of their block.
            self.add(rng.integers(3, 500, 1 + stream % BLOCK_SIZE, dtype=np.int32))
        self.turn()

    def add(self, tokens: npt.NDArray[np.int32], max_tokens: int | None = None) -> None:
        """One more request, of as many tokens as the model takes if nothing is said."""
        params = SamplingParams(
            max_tokens=max_tokens or self._max_model_len, temperature=0.0, ignore_eos=True
        )
        request = AddRequest(
            stream=self._num_added, tokens=tokens, num_prompt=len(tokens), params=params, block_hashes=[]
        )
        while not self._requests.try_push(Kind.ADD, encode_add(EPOCH, request)):
            self._core.admit()
        self._num_added += 1

    def turn(self, num_steps: int = BLOCK_SIZE, clock: Callable[[], float] = time.thread_time) -> float:
        """Seconds of a step by `clock`, over `num_steps` of them."""
        began = clock()
        for _ in range(num_steps):
            assert self._core.step()
        seconds = clock() - began
        while self._frontend.read():
            self._frontend.release()
        return seconds / num_steps
