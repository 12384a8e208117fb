"""What is counted, where it lies, and how it looks to Prometheus."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from engine_numbers import FACTS, GAUGES, GPU_GAUGES
from prometheus_client.parser import text_string_to_metric_families

from streamserve.frontend import processes
from streamserve.frontend.exposition import EngineNumbers, Exposition
from streamserve.frontend.families import Kind
from streamserve.frontend.metrics import CELL_BYTES, PID_CELL, Layout, Metrics, Row


class Server:
    """The rows of some frontends, and what they look like together."""

    def __init__(
        self, num_frontends: int = 1, key_names: tuple[str, ...] = ("",), supervisor: int | None = None
    ) -> None:
        self.supervisor = supervisor
        self.layout = Layout(key_names)
        self.memory = memoryview(bytearray(self.layout.segment_bytes(num_frontends)))
        size = self.layout.row_bytes
        rows = [self.memory[at : at + size] for at in range(0, len(self.memory), size)]
        self.metrics = [Metrics(Row(self.layout, row)) for row in rows]

    def text(self, engine: EngineNumbers | None = None, num_restarts: int = 0) -> str:
        exposition = Exposition(self.layout, self.memory, 'mo"del', self.supervisor)
        return exposition.render(engine, num_restarts).decode()

    def samples(self, engine: EngineNumbers | None = None) -> dict[str, float]:
        """Name and labels in the order of Prometheus' own reader, without those that all vllm: names have."""
        found = {}
        for family in text_string_to_metric_families(self.text(engine)):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                inside = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
                found[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
        return found


def test_cells_of_a_row_do_not_overlap_and_rows_are_apart() -> None:
    layout = Layout(("a", "b"))
    taken = {PID_CELL}
    for family in layout.families:
        for labels in family.series:
            cells = set(
                range(layout.place(family.name, labels), layout.place(family.name, labels) + family.width)
            )
            assert not cells & taken
            taken |= cells
    assert max(taken) * CELL_BYTES < layout.row_bytes
    assert layout.row_bytes % 64 == 0
    assert len({family.name for family in layout.families}) == len(layout.families)


def test_a_layout_depends_on_the_names_alone() -> None:
    assert Layout(("a", "b", "a")).row_bytes == Layout(("a", "b")).row_bytes
    assert Layout(tuple(map(str, range(100)))).row_bytes > Layout(("a",)).row_bytes


@pytest.mark.parametrize(
    ("value", "first"), [(0.0, 0.001), (0.001, 0.001), (0.0011, 0.005), (1e9, float("inf"))]
)
def test_an_observation_falls_into_all_buckets_that_hold_it(value: float, first: float) -> None:
    server = Server()
    server.metrics[0].latency.first_token.observe(value)
    samples = server.samples()
    name = "vllm:time_to_first_token_seconds"
    buckets = {
        float(key.partition("le=")[2].rstrip("}")): count
        for key, count in samples.items()
        if key.startswith(f"{name}_bucket")
    }
    assert buckets == {bound: float(bound >= first) for bound in buckets}
    assert samples[f"{name}_sum"] == value
    assert samples[f"{name}_count"] == 1


def test_observations_can_be_counted_in_bulk() -> None:
    server = Server()
    server.metrics[0].latency.between_tokens.observe(0.03, 7)
    samples = server.samples()
    assert samples["vllm:inter_token_latency_seconds_count"] == 7
    assert samples["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.21)
    assert samples["vllm:inter_token_latency_seconds_bucket{le=0.025}"] == 0
    assert samples["vllm:inter_token_latency_seconds_bucket{le=0.05}"] == 7


def test_frontends_are_summed_and_those_of_a_process_shown_apart() -> None:
    server = Server(num_frontends=2, key_names=("alice", "bob"))
    for index, metrics in enumerate(server.metrics):
        metrics.prompt_tokens.add(10 * (index + 1))
        metrics.of_key("bob").generation_tokens.add(index + 1)
        metrics.streams_open.set(index + 5)
        metrics.latency.whole.observe(1.0)
        metrics.row.counter("streamserve:ring_used_bytes", "delta").set(100 * index)
    samples = server.samples()
    assert samples["vllm:prompt_tokens_total"] == 30
    assert samples["vllm:e2e_request_latency_seconds_count"] == 2
    assert samples["streamserve:key_generation_tokens_total{key=bob}"] == 3
    assert samples["streamserve:key_generation_tokens_total{key=alice}"] == 0
    assert samples["streamserve:streams_open{frontend=0}"] == 5
    assert samples["streamserve:streams_open{frontend=1}"] == 6
    assert samples["streamserve:ring_used_bytes{frontend=1,ring=delta}"] == 100


def test_the_engines_numbers_have_vllms_names() -> None:
    samples = Server().samples(EngineNumbers(FACTS, GAUGES))
    assert samples["vllm:num_requests_running"] == 3
    assert samples["vllm:num_requests_waiting"] == 2
    assert samples["vllm:kv_cache_usage_perc"] == 0.25
    assert samples["vllm:prefix_cache_queries_total"] == 100
    assert samples["vllm:prefix_cache_hits_total"] == 40
    assert samples["vllm:num_preemptions_total"] == 1
    assert samples["vllm:iteration_tokens_total_count"] == 10
    assert samples["vllm:iteration_tokens_total_sum"] == 90
    assert samples["vllm:iteration_tokens_total_bucket{le=8.0}"] == 7
    assert samples["vllm:iteration_tokens_total_bucket{le=+Inf}"] == 10
    assert samples["vllm:num_requests_waiting_by_reason{reason=capacity}"] == 2
    assert samples["vllm:num_requests_waiting_by_reason{reason=deferred}"] == 0
    assert samples["vllm:engine_sleep_state{sleep_state=awake}"] == 1
    assert samples["vllm:engine_sleep_state{sleep_state=weights_offloaded}"] == 0
    assert samples["streamserve:engine_host_seconds_total{phase=execute}"] == 2.5
    assert samples["streamserve:engine_last_step_seconds{phase=settle}"] == 0.001
    assert samples["streamserve:engine_up"] == 1
    info = [name for name in samples if name.startswith("vllm:cache_config_info")]
    assert info == [
        "vllm:cache_config_info{block_size=16,enable_prefix_caching=True,kv_cache_size_tokens=1024,num_gpu_blocks=64}"
    ]


def test_graphs_and_the_memory_of_a_gpu() -> None:
    samples = Server().samples(EngineNumbers(FACTS, GAUGES | GPU_GAUGES))
    steps = [
        samples[f"streamserve:graph_steps_total{{mode={mode}}}"] for mode in ("FULL", "PIECEWISE", "NONE")
    ]
    assert steps == [5, 3, 2]
    assert samples["streamserve:graph_padded_tokens_total"] == 17
    assert samples["streamserve:graph_fallbacks_total"] == 1
    assert samples["streamserve:graphs{state=captured}"] == 40
    assert samples["streamserve:graphs{state=waiting}"] == 46
    assert samples["streamserve:graphs_bytes"] == 1 << 30
    assert samples["streamserve:gpu_memory_bytes{part=weights}"] == 15 << 30
    assert samples["streamserve:gpu_memory_bytes{part=cache}"] == 50 << 30
    assert samples["streamserve:device_gaps_total"] == 1000
    assert samples["streamserve:device_gap_seconds_total"] == 0.02
    on_a_cpu = Server().samples(EngineNumbers(FACTS, GAUGES))
    assert not [name for name in on_a_cpu if "graph" in name or "gpu_memory" in name or "gap" in name]


def test_without_an_engine_there_are_no_numbers_of_one() -> None:
    samples = Server().samples()
    assert samples["streamserve:engine_up"] == 0
    assert not [name for name in samples if "num_requests_running" in name or "kv_cache" in name]
    assert "vllm:time_to_first_token_seconds_count" in samples


def test_an_engine_without_blocks_is_not_divided_by() -> None:
    numbers = EngineNumbers(FACTS, {**GAUGES, "num_blocks": 0, "free_blocks": 0})
    assert Server().samples(numbers)["vllm:kv_cache_usage_perc"] == 0


def test_every_vllm_series_says_which_model_and_engine() -> None:
    text = Server().text(EngineNumbers(FACTS, GAUGES), num_restarts=2)
    for line in text.splitlines():
        if line.startswith("vllm:"):
            assert 'model_name="mo\\"del",engine="0"' in line
        assert not line.startswith(("http_requests_total", "http_request_duration_seconds_bucket"))
    assert "streamserve:engine_restarts_total 2.0" in text


def test_prometheus_reads_the_kinds_as_they_are_meant() -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(Server().text())}
    for family in Layout().families:
        assert kinds[family.name] == family.kind.value


def test_a_new_process_takes_over_counters_but_not_gauges() -> None:
    server = Server()
    server.metrics[0].prompt_tokens.add(5)
    server.metrics[0].streams_open.set(3)
    successor = Row(server.layout, server.memory)
    successor.take_over(pid=1234)
    assert successor.counter("vllm:prompt_tokens").value == 5
    assert successor.counter("streamserve:streams_open").value == 0


def test_a_name_that_the_layout_does_not_know_is_counted_nowhere() -> None:
    server = Server()
    before = bytes(server.memory)
    server.metrics[0].of_key("stranger").requests.add()
    assert bytes(server.memory) == before


def test_the_size_of_a_body_is_a_summary() -> None:
    server = Server()
    size = server.metrics[0].row.histogram("http_request_size_bytes", "/tokenize")
    for num_bytes in (0, 100, 250):
        size.observe(num_bytes)
    samples = server.samples()
    assert samples["http_request_size_bytes_count{handler=/tokenize}"] == 3
    assert samples["http_request_size_bytes_sum{handler=/tokenize}"] == 350
    assert not [name for name in samples if name.startswith("http_response_size_bytes")]


@pytest.mark.parametrize("part", ["queue", "prefill", "decode", "inference"])
def test_parts_of_a_requests_time_are_shown_as_vllm_does(part: str) -> None:
    server = Server(num_frontends=2)
    for metrics, seconds in zip(server.metrics, (0.3, 8000.0), strict=True):
        getattr(metrics.latency, part).observe(seconds)
    samples = server.samples()
    name = f"vllm:request_{part}_time_seconds"
    assert [samples[f"{name}_bucket{{le={le}}}"] for le in ("0.3", "7680.0", "+Inf")] == [1, 1, 2]
    assert (samples[f"{name}_count"], samples[f"{name}_sum"]) == (2, 8000.3)


# Processes


def test_each_process_of_the_server_is_shown_with_what_it_uses() -> None:
    server = Server(num_frontends=3, supervisor=os.getppid())
    server.metrics[0].row.take_over(os.getpid())
    # The second one has not started yet, and the third has died.
    server.metrics[2].row.take_over(2**22 + 1)
    samples = server.samples(EngineNumbers(FACTS, GAUGES))
    for family in processes.FAMILIES:
        suffix = "_total" if family.kind is Kind.COUNTER else ""
        shown = {name for name in samples if name.startswith(f"{family.name}{suffix}{{")}
        labels = ("supervisor", "engine", "frontend-0")
        assert shown == {f"{family.name}{suffix}{{process={label}}}" for label in labels}
    # Both are this process.
    own, engine = (
        samples[f"process_resident_memory_bytes{{process={who}}}"] for who in ("frontend-0", "engine")
    )
    assert own > 2**20
    assert engine == pytest.approx(own, rel=0.5)


def test_a_frontend_by_itself_shows_no_processes() -> None:
    assert "process_" not in Server().text()


def test_families_are_complete() -> None:
    for family in Layout().families:
        assert family.help.endswith(".")
        assert (family.kind is Kind.HISTOGRAM) == bool(family.buckets), family.name
        assert list(family.buckets) == sorted(set(family.buckets))
        assert all(len(labels) == len(family.labels) for labels in family.series)
        assert dataclasses.is_dataclass(family)


def test_metrics_of_nobody_are_still_metrics() -> None:
    alone: Any = Metrics()
    alone.finished["abort"].add()
    assert alone.finished["abort"].value == 1
