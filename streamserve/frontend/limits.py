"""How many requests may wait for the engine before new ones are turned away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from streamserve.errors import Overloaded

MAX_RETRY_AFTER_S = 60
# Weight of the newest interval in the running mean of the time between two starts.
_SMOOTHING = 0.2


class Admission:
    """Counts requests from their acceptance to their first token.

    Args:
        max_waiting: most of them at a time.

    Attributes:
        waiting: how many there are.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.waiting = 0
        self._last_start_s: float | None = None
        self._mean_interval_s = 0.0

    def enter(self) -> None:
        """Takes a place in the queue.

        Raises:
            Overloaded: all are taken.
        """
        if self.waiting >= self.max_waiting:
            raise Overloaded(
                f"{self.waiting} requests are waiting for the engine already; try again later.",
                self.retry_after_s(),
            )
        self.waiting += 1

    def leave(self) -> None:
        """Gives the place back without a start: refused, or nobody waits any more."""
        assert self.waiting > 0, "more requests left the queue than entered it"
        self.waiting -= 1

    def start(self, now_s: float) -> None:
        """Gives the place back because the engine has begun to answer, at monotonic time `now_s`."""
        self.leave()
        if self._last_start_s is not None:
            self._mean_interval_s += _SMOOTHING * (now_s - self._last_start_s - self._mean_interval_s)
        self._last_start_s = now_s

    def retry_after_s(self) -> int:
        """Whole seconds in which a place is likely to become free."""
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(self._mean_interval_s)))

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Holds a place while a request is tokenised, so that a flood is turned away before that work."""
        self.enter()
        try:
            yield
        finally:
            self.leave()
