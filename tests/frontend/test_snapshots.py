"""What the dashboard is told, of a server whose counters are put where they are by hand."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
from engine_numbers import FACTS, GAUGES, GPU_GAUGES

from streamserve.frontend.exposition import EngineNumbers
from streamserve.frontend.metrics import Layout, Metrics, Row
from streamserve.frontend.rows import Rows
from streamserve.frontend.snapshots import Snapshot, Snapshots


class Server:
    """Frontends that count, an engine that says what it is told to, and what is shown of them."""

    def __init__(self, num_frontends: int = 2) -> None:
        layout = Layout()
        memory = memoryview(bytearray(layout.segment_bytes(num_frontends)))
        size = layout.row_bytes
        self.rows = [Row(layout, memory[at : at + size]) for at in range(0, len(memory), size)]
        self.metrics = [Metrics(row) for row in self.rows]
        self.snapshots = Snapshots(Rows(layout, memory))
        self.facts = FACTS
        self.gauges: dict[str, Any] | None = dict(GAUGES)

    def take(self, now_s: float) -> Snapshot:
        engine = None if self.gauges is None else EngineNumbers(self.facts, dict(self.gauges))
        return self.snapshots.take(now_s, engine, 0)

    def add(self, **numbers: int) -> None:
        assert self.gauges is not None
        for name, value in numbers.items():
            self.gauges[name] += value


def numbers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers(each)]
    return [value]


def test_there_are_only_numbers_in_it() -> None:
    server = Server()
    server.rows[0].take_over(os.getpid())
    for now_s in (1.0, 2.0):
        for number in numbers(server.take(now_s)):
            assert number is None or (isinstance(number, int | float) and math.isfinite(number))


def test_rates_are_those_of_all_frontends_over_three_seconds() -> None:
    server = Server()
    assert server.take(100.0)["tokens_per_s"] == {"generated": None, "prompt": None}
    for second in range(1, 10):
        server.metrics[0].generation_tokens.add(10)
        server.metrics[1].generation_tokens.add(5)
        server.metrics[1].prompt_tokens.add(100)
        shown = server.take(100.0 + second)
        assert shown["tokens_per_s"] == {"generated": 15.0, "prompt": 100.0}
    halted = [server.take(110.0 + second)["tokens_per_s"]["generated"] for second in range(4)]
    assert halted == pytest.approx([10.0, 5.0, 0.0, 0.0])


def test_quantiles_forget_what_is_older_than_half_a_minute() -> None:
    server = Server()
    server.take(0.0)
    server.metrics[0].latency.first_token.observe(3.0)
    server.metrics[1].latency.first_token.observe(0.03)
    server.metrics[1].latency.between_tokens.observe(0.005, 8)
    assert server.take(1.0)["first_token_s"]["p99"] > 2.5
    for second in range(2, 31):
        assert server.take(float(second))["first_token_s"]["p50"] == pytest.approx(0.04)
    assert server.take(31.0)["first_token_s"] == {"p50": None, "p95": None, "p99": None}
    server.metrics[0].latency.first_token.observe(0.03)
    shown = server.take(32.0)
    assert 0.02 < shown["first_token_s"]["p99"] <= 0.04
    assert shown["between_tokens_s"]["p50"] is None


def test_gauges_and_cache() -> None:
    server = Server()
    for metrics in server.metrics:
        metrics.streams_open.add(2)
    shown = server.take(0.0)
    assert shown["requests"] == {"running": 3, "waiting": 2, "open": 4.0}
    assert shown["cache"] == {"used": 0.25, "hits": None}
    server.add(prefix_queries=50, prefix_hits=30)
    assert server.take(1.0)["cache"]["hits"] == pytest.approx(0.6)


def test_the_mean_of_steps() -> None:
    server = Server()
    assert server.gauges is not None
    server.gauges |= GPU_GAUGES
    server.take(0.0)
    server.add(steps=4, step_tokens=40, schedule_ns=8_000_000, execute_ns=80_000_000, settle_ns=4_000_000)
    server.add(device_gaps=2, device_gap_ns=1_000_000)
    steps = server.take(2.0)["steps"]
    assert steps == pytest.approx(
        {"per_s": 2.0, "tokens": 10.0, "host_s": 0.003, "model_s": 0.02, "device_idle_s": 0.0005}
    )
    server.take(3.0)
    assert server.take(6.0)["steps"] == {
        "per_s": 0.0, "tokens": None, "host_s": None, "model_s": None, "device_idle_s": None,
    }  # fmt: skip


def test_rings_are_as_full_as_the_fullest() -> None:
    server = Server()
    for row, used in zip(server.rows, (10, 30), strict=True):
        row.counter("streamserve:ring_capacity_bytes", "delta").set(100)
        row.counter("streamserve:ring_used_bytes", "delta").set(used)
    assert server.take(0.0)["rings"] == {"request": 0.0, "delta": 0.3}


def test_errors_are_those_of_half_a_minute() -> None:
    server = Server()
    assert server.take(0.0)["errors"] == {"failed": 0.0, "rejected": 0.0, "http_5xx": 0.0}
    server.metrics[0].finished["error"].add()
    server.metrics[1].rejected["max_waiting"].add(2)
    server.metrics[1].rejected["max_queue_time"].add()
    server.rows[0].counter("http_requests", "/v1/completions", "POST", "5xx").add()
    errors = {"failed": 1.0, "rejected": 3.0, "http_5xx": 1.0}
    assert server.take(1.0)["errors"] == errors
    assert server.take(30.0)["errors"] == errors
    assert server.take(31.0)["errors"] == {"failed": 0.0, "rejected": 0.0, "http_5xx": 0.0}


def test_a_new_engine_is_not_measured_by_the_old_one() -> None:
    server = Server()
    server.take(0.0)
    assert server.gauges is not None
    server.gauges |= {"steps": 1, "prefix_queries": 0, "prefix_hits": 0}
    server.facts = dataclasses.replace(FACTS, epoch=2)
    shown = server.take(1.0)
    assert (shown["steps"]["per_s"], shown["cache"]["hits"]) == (0.0, None)
    server.gauges = None
    shown = server.take(2.0)
    assert shown["engine"]["up"] == 0
    assert shown["requests"]["running"] is None
    assert shown["cache"] == {"used": None, "hits": None}


def test_what_was_before_a_long_break_is_no_measure() -> None:
    server = Server()
    server.take(0.0)
    server.metrics[0].generation_tokens.add(1000)
    assert server.take(1000.0)["tokens_per_s"]["generated"] is None
    assert server.take(1001.0)["tokens_per_s"]["generated"] == 0.0


def test_processes() -> None:
    server = Server(num_frontends=3)
    server.rows[0].take_over(os.getpid())
    server.rows[2].take_over(os.getppid())
    server.metrics[2].streams_open.add(7)
    server.take(0.0)
    shown = server.take(1.0)["processes"]
    # Of the second there is no process yet.
    assert list(shown) == ["engine", "frontend-0", "frontend-2"]
    assert shown["frontend-2"]["streams"] == 7.0
    assert shown["frontend-0"]["pid"] == shown["engine"]["pid"] == os.getpid()
    assert shown["engine"]["memory_bytes"] > 1e6
    assert 0.0 <= shown["engine"]["cpu"] < 1000.0
    server.rows[0].take_over(2**22 + 1)
    assert "frontend-0" not in server.take(2.0)["processes"]
