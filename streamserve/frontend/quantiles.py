"""Quantiles of what a histogram has counted."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value that this share of all observations does not exceed, as well as buckets tell.

    Within a bucket observations are taken to lie evenly, as Prometheus' `histogram_quantile` does, so that
    both name the same number. The first bucket begins at 0; what is above all bounds counts as the last.

    Args:
        bounds: upper bounds of the buckets, rising.
        counts: observations in each bucket by itself, and in the last place those above all bounds.
        share: 0 to 1.

    Returns:
        None if there are no observations.
    """
    rank = share * sum(counts)
    below = 0.0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            if index == len(bounds):
                return bounds[-1]
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * max(0.0, rank - below) / count
        below += count
    return None
