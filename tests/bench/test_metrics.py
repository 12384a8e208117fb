from __future__ import annotations

import pytest

from streamserve.bench.metrics import calculate
from streamserve.bench.timing import Outcome


def outcomes() -> list[Outcome]:
    return [
        Outcome(10, start_time=5.0, ttft=0.1, itl=[0.1, 0.2], latency=0.4, output_tokens=3),
        Outcome(20, start_time=5.5, ttft=0.3, itl=[0.4], latency=0.7, output_tokens=5, queue_time=0.5),
        Outcome(30, start_time=7.9, ttft=0.2, latency=0.2, output_tokens=1),
        Outcome(99, start_time=5.0, ttft=9.0, itl=[9.0], latency=9.0, output_tokens=99, error="HTTP 500: no"),
    ]


def test_throughput_counts_what_succeeded() -> None:
    metrics = calculate(outcomes(), 3.0, [99.0], {})
    assert (metrics.completed, metrics.failed) == (3, 1)
    assert (metrics.total_input, metrics.total_output) == (60, 9)
    assert metrics.request_throughput == 1.0
    assert metrics.output_throughput == 3.0
    assert metrics.total_token_throughput == 23.0
    assert metrics.request_goodput == 0.0


def test_distributions_are_in_milliseconds() -> None:
    metrics = calculate(outcomes(), 3.0, [25.0, 99.0], {})
    assert metrics.ttft.mean == pytest.approx(200.0)
    assert metrics.ttft.median == pytest.approx(200.0)
    assert metrics.ttft.std == pytest.approx(81.64966)
    assert metrics.ttft.percentiles == pytest.approx({25.0: 150.0, 99.0: 298.0})
    # A value for each gap, whatever request it is of; a request of one token has no TPOT.
    assert metrics.itl.mean == pytest.approx(700.0 / 3)
    assert metrics.tpot.mean == pytest.approx((150.0 + 100.0) / 2)
    assert metrics.e2el.median == pytest.approx(400.0)
    assert metrics.client_queue_time.mean == pytest.approx(500.0 / 3)
    assert metrics.e2el_including_client_queue.percentiles[99.0] == pytest.approx(1184.0)


@pytest.mark.parametrize(
    ("objectives", "num_good"),
    [({"ttft": 200.0}, 2), ({"ttft": 200.0, "tpot": 100.0}, 1), ({"e2el": 700.0}, 3), ({"tpot": 1.0}, 1)],
)
def test_goodput_is_what_met_all_objectives(objectives: dict[str, float], num_good: int) -> None:
    assert calculate(outcomes(), 2.0, [99.0], objectives).request_goodput == num_good / 2.0


def test_peaks_are_of_whole_seconds() -> None:
    metrics = calculate(outcomes(), 3.0, [99.0], {})
    # In the first second: three chunks of the first request and one of the second.
    assert metrics.max_output_tokens_per_s == 4.0
    assert metrics.max_concurrent_requests == 2


def test_nothing_succeeded() -> None:
    metrics = calculate([Outcome(1, error="x")], 1.0, [99.0], {"ttft": 1.0})
    assert (metrics.completed, metrics.failed, metrics.request_goodput) == (0, 1, 0.0)
    assert metrics.ttft.percentiles == {99.0: 0.0}
