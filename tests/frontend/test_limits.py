"""How many may wait, and what those that may not are told."""

from __future__ import annotations

import pytest

from streamserve.errors import Overloaded
from streamserve.frontend.limits import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, WINDOW_S, Admission


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_admission_counts_places() -> None:
    admission = Admission(2)
    admission.enter()
    with admission.preparing(), pytest.raises(Overloaded):
        admission.enter()
    assert admission.waiting == 1
    assert admission.rejected == 1
    admission.start()
    assert admission.waiting == 0


@pytest.mark.parametrize(("per_start_s", "expected"), [(0.001, 1), (0.1, 5), (0.5, 25), (2.0, 60)])
def test_retry_after_is_the_queue_over_its_drain_rate(per_start_s: float, expected: int) -> None:
    clock = Clock()
    admission = Admission(50, clock)
    for _ in range(50):
        admission.enter()
    for _ in range(20):
        clock.now_s += per_start_s
        admission.start()
        admission.enter()
    with pytest.raises(Overloaded) as refused:
        admission.enter()
    assert refused.value.retry_after_s == pytest.approx(expected, abs=1)


def test_time_without_a_queue_does_not_count() -> None:
    clock = Clock()
    admission = Admission(100, clock)
    for _ in range(10):
        clock.now_s += 2.0
        admission.enter()
        clock.now_s += 0.1
        admission.start()
    for _ in range(100):
        admission.enter()
    assert admission.retry_after_s() == 10


def test_requests_that_start_together_count_each() -> None:
    clock = Clock()
    admission = Admission(100, clock)
    for _ in range(100):
        admission.enter()
    clock.now_s += 1.0
    for _ in range(20):
        admission.start()
    assert admission.retry_after_s() == 4


def test_a_queue_that_stands_still_is_seen_to() -> None:
    clock = Clock()
    admission = Admission(10, clock)
    for _ in range(10):
        admission.enter()
    assert admission.retry_after_s() == MIN_RETRY_AFTER_S
    clock.now_s += 20.0
    assert admission.retry_after_s() == 20
    admission.start()
    clock.now_s += WINDOW_S + 1
    assert admission.retry_after_s() == WINDOW_S + 1
    clock.now_s += 1000
    assert admission.retry_after_s() == MAX_RETRY_AFTER_S


def test_an_old_rate_is_forgotten() -> None:
    clock = Clock()
    admission = Admission(10, clock)
    for _ in range(10):
        admission.enter()
    for _ in range(5):
        clock.now_s += 10.0
        admission.start()
        admission.enter()
    for _ in range(40):
        clock.now_s += 1.0
        admission.start()
        admission.enter()
    assert admission.retry_after_s() == 10


def test_nobody_waits() -> None:
    admission = Admission(10)
    assert admission.retry_after_s() == MIN_RETRY_AFTER_S
