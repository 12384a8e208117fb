"""When requests are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RampUp:
    """A rate that grows from the first request to the last.

    Attributes:
        strategy: linear or exponential.
        start_rps, end_rps: requests a second at either end.
    """

    strategy: str
    start_rps: float
    end_rps: float

    def rate(self, progress: float) -> float:
        """The rate after a share `progress` of the requests."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * math.pow(self.end_rps / self.start_rps, progress)


def arrival_times(
    count: int, rate: float, burstiness: float, rng: np.random.Generator, ramp_up: RampUp | None = None
) -> Sequence[float]:
    """Seconds from the start at which each request is sent.

    The times between them have a gamma distribution with shape `burstiness`: 1 is a Poisson process, less is
    more bursty, more is more even, and infinity is a fixed interval. At a constant rate all times are scaled
    so that the last request comes at `count / rate`, whatever the draw.

    Args:
        count: of requests.
        rate: requests a second; infinite is all at once.
        burstiness: more than 0.
        rng: where chance comes from.
        ramp_up: a rate that changes, instead of `rate`.
    """
    if ramp_up is None and math.isinf(rate):
        return [0.0] * count
    if ramp_up is None:
        rates = np.full(count, rate)
    else:
        rates = np.array([ramp_up.rate(index / max(count - 1, 1)) for index in range(count)])
    is_even = math.isinf(burstiness)
    gaps = 1.0 / rates if is_even else rng.gamma(burstiness, 1.0 / (rates * burstiness))
    times = np.cumsum(gaps)
    if ramp_up is None and times[-1] > 0.0:
        times *= count / rate / times[-1]
    return [float(time) for time in times]
