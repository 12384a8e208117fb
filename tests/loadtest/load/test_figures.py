"""Histograms, summaries, tables, thresholds and timelines, from known values."""

from __future__ import annotations

import csv
import random
from collections import Counter
from pathlib import Path

import pytest

from loadtest.load import client_cpu
from loadtest.load.histogram import bucket, mean, merge, percentile, since
from loadtest.load.summary import INTER_TOKEN, TTFT, WHOLE, Summary, summarise, table, write_csv
from loadtest.load.thresholds import Thresholds
from loadtest.load.timeline import Counts, Timeline


@pytest.mark.parametrize(
    ("value", "counted"),
    [
        (0.0, 0.0),
        (-1.0, 0.0),
        (0.0004, 0.0),
        (0.0126, 0.013),
        (4.1267, 4.13),
        (147.4, 147.0),
        (58764.0, 58800.0),
    ],
)
def test_three_digits_are_kept(value: float, counted: float) -> None:
    assert bucket(value) == counted


def test_buckets_are_few_and_near() -> None:
    rng = random.Random(1)
    values = [rng.lognormvariate(2.0, 1.5) for _ in range(100_000)]
    histogram = Counter(map(bucket, values))
    assert len(histogram) < 4000
    for percent in (50, 95, 99):
        exact = sorted(values)[len(values) * percent // 100]
        assert percentile(histogram, percent) == pytest.approx(exact, rel=0.01)
    assert mean(histogram) == pytest.approx(sum(values) / len(values), rel=0.001)


def test_percentiles_are_values_that_occurred() -> None:
    histogram = {1.0: 50, 2.0: 45, 9.0: 5}
    assert [percentile(histogram, percent) for percent in (50, 51, 95, 96, 100)] == [1.0, 2.0, 2.0, 9.0, 9.0]
    assert percentile({}, 50) == mean({}) == 0.0


def test_what_came_since() -> None:
    assert since({1.0: 5, 2.0: 1}, {1.0: 3}) == {1.0: 2, 2.0: 1}
    assert since({1.0: 5}, {1.0: 5}) == {}
    # Counting began anew.
    assert since({3.0: 1}, {1.0: 5}) == {3.0: 1}
    assert merge(({1.0: 1}, {1.0: 2, 2.0: 1})) == {1.0: 3, 2.0: 1}


def summary(**changes: float) -> Summary:
    histograms = {
        (TTFT, "SSE"): {10.0: 90, 200.0: 10},
        (TTFT, "WS"): {20.0: 100},
        (INTER_TOKEN, "SSE"): {4.5: 980, 30.0: 20},
        (INTER_TOKEN, "WS"): {},
        (WHOLE, "SSE"): {500.0: 100},
    }
    totals = {"duration_s": 10.0, "tokens": 5000, "requests": 200, "errors": 3, "client_cpu": 0.25}
    return summarise(histograms, **{**totals, **changes})


def test_a_summary_tells_transports_apart_and_all_together() -> None:
    result = summary()
    assert result.by_transport[TTFT, "SSE"].p95 == 200.0
    assert (TTFT, "WS") in result.by_transport
    assert (INTER_TOKEN, "WS") not in result.by_transport
    assert (result.ttft.count, result.ttft.p50, result.ttft.p95, result.ttft.p99) == (200, 20.0, 20.0, 200.0)
    assert result.inter_token.p99 == 30.0
    assert (result.tokens_per_s, result.requests_per_s, result.error_rate) == (500.0, 20.0, 0.015)


def test_the_table_says_it_all() -> None:
    assert table(summary()).splitlines() == [
        "ms                  p50    p95    p99   mean  count",
        "---------------------------------------------------",
        "TTFT         SSE   10.0  200.0  200.0   29.0    100",
        "TTFT         WS    20.0   20.0   20.0   20.0    100",
        "inter-token  SSE    4.5    4.5   30.0    5.0  1,000",
        "whole answer SSE  500.0  500.0  500.0  500.0    100",
        "TTFT         all   20.0   20.0  200.0   24.5    200",
        "inter-token  all    4.5    4.5   30.0    5.0  1,000",
        "---------------------------------------------------",
        "output tokens/s  500.0",
        "requests/s       20.00",
        "errors           3 of 200 (1.50 %)",
        "client           0.25 processors",
    ]
    assert "its own queue is in these times" in table(summary(client_cpu=0.9))


def test_a_table_of_nothing() -> None:
    nothing = summarise({}, duration_s=0.0, tokens=0, requests=0, errors=0, client_cpu=0.0)
    assert "errors           0 of 0 (0.00 %)" in table(nothing)


def test_the_csv_file_has_the_same(tmp_path: Path) -> None:
    write_csv(summary(), tmp_path / "x.csv")
    with (tmp_path / "x.csv").open() as file:
        rows = {(row["figure"], row["transport"]): row for row in csv.DictReader(file)}
    assert rows["TTFT", "SSE"]["p95_ms"] == "200.0"
    assert rows["inter-token", "all"]["p50_ms"] == "4.5"
    assert rows["output tokens", "all"]["per_second"] == "500.0"
    assert rows["errors", "all"]["count"] == "3"


@pytest.mark.parametrize(
    ("limits", "missed"),
    [
        (Thresholds(20.0, 30.0, 500.0, 0.015), []),
        (Thresholds(max_ttft_p95=19.9), ["TTFT p95 20.0 ms is more than 19.9 ms"]),
        (Thresholds(max_itl_p99=29.0), ["inter-token p99 30.0 ms is more than 29 ms"]),
        (Thresholds(min_tokens_per_s=501.0), ["500.0 tokens/s is less than 501"]),
        (Thresholds(max_error_rate=0.01), ["error rate 0.0150 is more than 0.01"]),
    ],
)
def test_thresholds(limits: Thresholds, missed: list[str]) -> None:
    assert list(limits.missed(summary())) == missed


def test_what_was_not_measured_keeps_no_limit() -> None:
    nothing = summarise({}, duration_s=1.0, tokens=0, requests=0, errors=0, client_cpu=0.0)
    assert len(list(Thresholds(1.0, 1.0, 1.0, 0.0).missed(nothing))) == 4
    assert not list(Thresholds().missed(nothing))


def test_samples_are_differences() -> None:
    before = Counts(1.0, 100, 5, 1, {10.0: 5}, {1.0: 95})
    now = Counts(2.5, 160, 8, 1, {10.0: 6, 30.0: 2}, {1.0: 152})
    sample = now.since(before, users=3)
    assert (sample.end_s, sample.seconds, sample.users) == (2.5, 1.5, 3)
    assert (sample.tokens, sample.requests, sample.errors) == (60, 3, 0)
    assert sample.ttft == {10.0: 1, 30.0: 2}
    assert sample.inter_token == {1.0: 57}
    # After `--reset-stats` all that is there is new.
    assert Counts(3.0, 7).since(now, users=3).tokens == 7


@pytest.mark.parametrize("count", [1, 8, 9, 1000])
def test_a_timeline_is_bounded_and_loses_nothing(count: int) -> None:
    timeline = Timeline(most=8)
    before = Counts()
    for number in range(1, count + 1):
        now = Counts(float(number), 10 * number, number, 0, {5.0: number}, {1.0: 9 * number})
        timeline.add(now.since(before, users=number))
        before = now
    samples = timeline.samples
    assert 1 <= len(samples) <= 8
    assert sum(sample.tokens for sample in samples) == 10 * count
    assert sum(sample.seconds for sample in samples) == count
    assert merge(sample.ttft for sample in samples) == {5.0: count}
    assert [sample.end_s for sample in samples] == sorted(sample.end_s for sample in samples)
    assert (samples[-1].end_s, samples[-1].users) == (count, count)


def test_the_busiest_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"monotonic": 100.0, "process_time": 5.0}
    monkeypatch.setattr(client_cpu.time, "monotonic", lambda: times["monotonic"])
    monkeypatch.setattr(client_cpu.time, "process_time", lambda: times["process_time"])
    cpu = client_cpu.ClientCpu()
    cpu.report("a", 30.0)
    times.update(monotonic=110.0, process_time=6.0)
    assert cpu.busiest() == pytest.approx(0.1)
    cpu.report("a", 39.0)
    cpu.report("b", 7.0)
    assert cpu.busiest() == pytest.approx(0.9)
    cpu.restart()
    assert cpu.busiest() == 0.0
