"""How busy the client itself is: one that is too busy measures its own queue."""

from __future__ import annotations

import time


class ClientCpu:
    """Processors that each process of the client has kept busy since a moment, in the mean."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """That moment is now."""
        self._begun = (time.monotonic(), time.process_time())
        # First and last report of each worker: the time here, and its processor time.
        self._workers: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {}

    def report(self, worker: str, cpu_s: float) -> None:
        """Takes in how much processor time a worker has had since it began."""
        now = (time.monotonic(), cpu_s)
        first, _ = self._workers.get(worker, (now, now))
        self._workers[worker] = (first, now)

    def busiest(self) -> float:
        """Processors of the process that kept most of them busy, this one or a worker."""
        own = (self._begun, (time.monotonic(), time.process_time()))
        return max(_share(*span) for span in (own, *self._workers.values()))


def _share(first: tuple[float, float], last: tuple[float, float]) -> float:
    seconds = last[0] - first[0]
    return (last[1] - first[1]) / seconds if seconds > 0.0 else 0.0
