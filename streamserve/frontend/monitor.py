"""Looks, twice a second, how late the event loop runs and how full the channel to the engine is.

Now and then it also has a look at what large requests have left behind (streamserve.frontend.heap).
"""

from __future__ import annotations

import asyncio

from streamserve.frontend.client import EngineClient
from streamserve.frontend.families import RINGS
from streamserve.frontend.heap import Heap
from streamserve.frontend.metrics import Metrics
from streamserve.frontend.resume.store import StreamStore

INTERVAL_S = 0.5
# The heap is looked at as often, which costs less than a ten-thousandth of the time.
HEAP_INTERVAL_S = 5.0
# Memory that is free is used again, so a little of it stays. What was given back counts as free still; to do
# so once more costs next to nothing.
SPARE_BYTES = 16 * 2**20


class Monitor:
    """Writes what it sees into this frontend's row.

    Args:
        client: what is looked at.
        metrics: where it is written.
        kept: looked at as well.
        heap: what is trimmed.
    """

    def __init__(
        self, client: EngineClient, metrics: Metrics, kept: StreamStore, heap: Heap | None = None
    ) -> None:
        row = metrics.row
        self._client = client
        self._kept = kept
        self._lag = row.histogram("streamserve:event_loop_lag_seconds")
        self._last_lag = row.counter("streamserve:event_loop_lag_last_seconds")
        self._unstarted = row.counter("streamserve:requests_unstarted")
        self._rejected = metrics.rejected["max_waiting"]
        self._num_counted = 0
        self._used = {ring: row.counter("streamserve:ring_used_bytes", ring) for ring in RINGS}
        self._capacity = {ring: row.counter("streamserve:ring_capacity_bytes", ring) for ring in RINGS}
        self._heap = heap or Heap()
        self._heap_due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to look, on the running loop."""
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sample(self) -> None:
        """Writes down what has no moment of its own: how full and how long things are."""
        self._kept.sample()
        admission = self._client.admission
        self._unstarted.set(admission.waiting)
        self._rejected.add(admission.rejected - self._num_counted)
        self._num_counted = admission.rejected
        for ring, statistics in self._client.ring_statistics().items():
            self._used[ring].set(statistics.used_bytes)
            self._capacity[ring].set(statistics.capacity)

    def tidy(self) -> None:
        """Gives freed memory back, if it is much."""
        if self._heap.free_bytes() > SPARE_BYTES:
            self._heap.trim()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = loop.time() + INTERVAL_S
        self._timer = loop.call_at(due_s, self._look, loop, due_s)

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        lag_s = max(0.0, loop.time() - due_s)
        self._lag.observe(lag_s)
        self._last_lag.set(lag_s)
        self.sample()
        if due_s >= self._heap_due_s:
            self._heap_due_s = due_s + HEAP_INTERVAL_S
            self.tidy()
        self._schedule(loop)
