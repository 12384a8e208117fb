"""When a user asks again, and how many users there are."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

SHAPES = ("constant", "ramp", "steps")


class Arrivals(Protocol):
    """Tells a user how long to pause."""

    def pause(self, now: float) -> float:
        """Seconds from `now`, a monotonic time, until its next request."""

    def lateness(self, now: float) -> float:
        """Seconds since the request of the last pause was due."""


class ThinkTime:
    """A closed loop: the user reads the answer for a while, then asks again.

    Args:
        mean_s: of the exponentially distributed while; 0 is none.
        rng: where chance comes from.
    """

    def __init__(self, mean_s: float, rng: random.Random) -> None:
        self._mean_s = mean_s
        self._rng = rng

    def pause(self, now: float) -> float:
        """A while; `now` does not matter."""
        return self._rng.expovariate(1 / self._mean_s) if self._mean_s > 0.0 else 0.0

    def lateness(self, now: float) -> float:
        """None: a request is due when the user asks."""
        return 0.0


class PoissonArrivals:
    """An open loop: requests come by a Poisson process, whether or not earlier ones have been answered.

    Several users at a rate each are one Poisson process at the sum of their rates.

    Args:
        rate: requests a second.
        rng: where chance comes from.
    """

    def __init__(self, rate: float, rng: random.Random) -> None:
        self._rate = rate
        self._rng = rng
        self._due: float | None = None

    def pause(self, now: float) -> float:
        """Until the next request is due; 0 if that is in the past, so that a late user catches up."""
        self._due = (now if self._due is None else self._due) + self._rng.expovariate(self._rate)
        return max(self._due - now, 0.0)

    def lateness(self, now: float) -> float:
        """How far a busy client is behind its plan."""
        return 0.0 if self._due is None else max(now - self._due, 0.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """How the number of users changes.

    Attributes:
        name: ramp or steps.
        users: at the end.
        duration_s: of the test.
        steps: plateaus of equal length and height, for steps.
    """

    name: str
    users: int
    duration_s: float
    steps: int

    def users_at(self, elapsed_s: float) -> int | None:
        """Users after so many seconds; None at the end of the test."""
        if elapsed_s >= self.duration_s:
            return None
        done = max(elapsed_s / self.duration_s, 0.0)
        if self.name == "steps":
            done = (math.floor(done * self.steps) + 1) / self.steps
        return max(math.ceil(self.users * done), 1)
