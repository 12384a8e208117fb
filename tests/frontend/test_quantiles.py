"""Quantiles out of buckets, against those of the values themselves."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.frontend.families import BETWEEN_TOKENS_S
from streamserve.frontend.quantiles import quantile

BOUNDS = (1.0, 2.0, 5.0, 10.0)
SHARES = st.floats(0.0, 1.0)


def buckets(values: list[float], bounds: tuple[float, ...]) -> list[float]:
    counts = [0.0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    return counts


def exact(values: list[float], share: float) -> float:
    """The least of the values that so many do not exceed, found by counting."""
    return next(value for value in sorted(values) if sum(v <= value for v in values) >= share * len(values))


@given(st.lists(st.floats(0.0001, 79.0), min_size=1, max_size=60), SHARES)
def test_it_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    found = quantile(BETWEEN_TOKENS_S, buckets(values, BETWEEN_TOKENS_S), share)
    assert found is not None
    index = bisect_left(BETWEEN_TOKENS_S, exact(values, share))
    lower = BETWEEN_TOKENS_S[index - 1] if index else 0.0
    assert lower - 1e-9 <= found <= BETWEEN_TOKENS_S[index] + 1e-9


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any), SHARES)
def test_values_that_lie_evenly_are_told_exactly(counts: list[int], share: float) -> None:
    lowers = (0.0, *BOUNDS)
    values = [
        lower + (upper - lower) * place / count
        for lower, upper, count in zip(lowers, BOUNDS, counts, strict=False)
        for place in range(1, count + 1)
    ]
    widest = max(upper - lower for lower, upper in zip(lowers, BOUNDS, strict=False))
    rarest = min(count for count in counts if count)
    found = quantile(BOUNDS, buckets(values, BOUNDS), share)
    assert found == pytest.approx(exact(values, share), abs=widest / rarest + 1e-9)


@given(st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any), SHARES, SHARES)
def test_a_larger_share_is_no_smaller_value(counts: list[int], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert (quantile(BOUNDS, counts, low) or 0.0) <= (quantile(BOUNDS, counts, high) or 0.0)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0, 0, 0], 0.5, None),
        ([10, 0, 0, 0, 0], 0.5, 0.5),
        ([0, 4, 0, 0, 0], 0.5, 1.5),
        ([0, 0, 2, 2, 0], 0.5, 5.0),
        ([0, 0, 2, 2, 0], 0.75, 7.5),
        ([1, 0, 0, 0, 99], 0.5, 10.0),
        ([0, 0, 3, 0, 0], 0.0, 2.0),
        ([0, 0, 3, 0, 0], 1.0, 5.0),
    ],
)
def test_examples(counts: list[float], share: float, expected: float | None) -> None:
    assert quantile(BOUNDS, counts, share) == expected
