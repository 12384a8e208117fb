"""Deadlines: which waiting requests have waited too long."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from streamserve.engine.scheduler.states import Request, State

# A heap of fewer is not worth tidying.
_MIN_TIDY = 64


class Deadlines:
    """The requests that must begin to run by some time, the most urgent first.

    Those that began, or went, stay in the heap until they come up or are half of it: to look for them each
    time would cost more than it is worth.
    """

    def __init__(self) -> None:
        # No two requests have the same arrival, so requests themselves are never compared.
        self._heap: list[tuple[int, int, Request]] = []
        self._tidy_at = _MIN_TIDY

    @property
    def next_ns(self) -> int | None:
        """When the next one is due, if none of them begins before; None if no request has a deadline."""
        heap = self._heap
        while heap and heap[0][2].state is not State.WAITING:
            heappop(heap)
        return heap[0][0] if heap else None

    def push(self, request: Request) -> None:
        """Watches a waiting request that has a deadline."""
        heappush(self._heap, (request.deadline_ns, request.arrival, request))
        if len(self._heap) >= self._tidy_at:
            self._heap = [entry for entry in self._heap if entry[2].state is State.WAITING]
            heapify(self._heap)
            self._tidy_at = max(_MIN_TIDY, 2 * len(self._heap))

    def pop(self, now_ns: int) -> list[Request]:
        """The requests that still wait though their deadline has passed; they are watched no more."""
        due: list[Request] = []
        while (next_ns := self.next_ns) is not None and next_ns <= now_ns:
            due.append(heappop(self._heap)[2])
        return due

    def __len__(self) -> int:
        return len(self._heap)
