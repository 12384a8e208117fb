"""Distributions as counts by value: small enough to be sent between processes, exact enough for
percentiles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

Histogram = Mapping[float, int]

_SIGNIFICANT_DIGITS = 3
_MOST_DECIMALS = 3


def bucket(milliseconds: float) -> float:
    """What `milliseconds` is counted under: three digits of it, and no finer than a microsecond."""
    if milliseconds <= 0.0:
        return 0.0
    decimals = _SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(milliseconds))
    return float(round(milliseconds, min(decimals, _MOST_DECIMALS)))


def percentile(histogram: Histogram, percent: float) -> float:
    """The least value that `percent` of them do not exceed; 0 if there are none."""
    left = math.ceil(sum(histogram.values()) * percent / 100)
    for value in sorted(histogram):
        left -= histogram[value]
        if left <= 0:
            return value
    return 0.0


def mean(histogram: Histogram) -> float:
    """The mean value; 0 if there are none."""
    count = sum(histogram.values())
    return sum(value * times for value, times in histogram.items()) / count if count else 0.0


def merge(histograms: Iterable[Histogram]) -> Counter[float]:
    """All values of several."""
    merged: Counter[float] = Counter()
    for histogram in histograms:
        merged.update(histogram)
    return merged


def since(now: Histogram, before: Histogram) -> Counter[float]:
    """The values that have come since `before`; all of them if the count began anew meanwhile."""
    if any(now.get(value, 0) < count for value, count in before.items()):
        return Counter(now)
    return Counter({value: more for value, count in now.items() if (more := count - before.get(value, 0))})
