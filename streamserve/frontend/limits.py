"""How many requests may wait for the engine before new ones are turned away, and when to come back."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from streamserve.errors import Overloaded

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1, 60
# The drain rate is that of the newest starts, at most so many of them and none that is older.
WINDOW_STARTS = 256
WINDOW_S = 30.0


class Admission:
    """Counts requests from their acceptance to their first token.

    The limit is for this frontend alone: of several on one port, each has its own queue and its own measure
    of how fast it moves.

    Args:
        max_waiting: most of them at a time.
        clock: monotonic seconds.

    Attributes:
        waiting: how many there are.
        rejected: how many were turned away so far.
    """

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_waiting = max_waiting
        self.waiting = 0
        self.rejected = 0
        self._clock = clock
        self._drain = DrainRate()

    def enter(self) -> None:
        """Takes a place in the queue.

        Raises:
            Overloaded: all are taken.
        """
        if self.waiting >= self.max_waiting:
            self.rejected += 1
            raise Overloaded(
                f"{self.waiting} requests are waiting for the engine already; try again later.",
                self.retry_after_s(),
            )
        if not self.waiting:
            self._drain.begin(self._clock())
        self.waiting += 1

    def leave(self) -> None:
        """Gives the place back without a start: refused, or nobody waits any more."""
        assert self.waiting > 0, "more requests left the queue than entered it"
        self.waiting -= 1

    def start(self) -> None:
        """Gives the place back because the engine has begun to answer."""
        self._drain.start(self._clock())
        self.leave()

    def retry_after_s(self) -> int:
        """Whole seconds after which those that wait now will have had their turn, as far as one can tell."""
        seconds = self._drain.seconds_for(self.waiting, self._clock())
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(seconds)))

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Holds a place while a request is tokenised, so that a flood is turned away before that work."""
        self.enter()
        try:
            yield
        finally:
            self.leave()


class DrainRate:
    """How fast a queue moves: starts over the time in which anybody waited. Times are monotonic seconds.

    Time without a queue does not count: it says how few came, not how many could have been served.
    """

    def __init__(self) -> None:
        # (when it was, how long somebody had waited since the start before it)
        self._starts: deque[tuple[float, float]] = deque(maxlen=WINDOW_STARTS)
        self._since_s = -math.inf

    def begin(self, now_s: float) -> None:
        """The queue is empty no longer."""
        self._since_s = now_s

    def start(self, now_s: float) -> None:
        """One of the queue has its turn."""
        self._starts.append((now_s, now_s - self._since_s))
        self._since_s = now_s

    def seconds_for(self, num_waiting: int, now_s: float) -> float:
        """How long it takes until `num_waiting` more have had their turn."""
        if not num_waiting:
            return 0.0
        # Nobody's turn has come since then: that, too, tells how fast the queue moves.
        standing_s = now_s - self._since_s
        recent = [busy_s for at_s, busy_s in self._starts if at_s > now_s - WINDOW_S]
        if not recent:
            return standing_s
        return num_waiting * (sum(recent) + standing_s) / len(recent)
