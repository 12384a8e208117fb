"""docs/grafana, docs/operations.md and vLLM's dashboards speak of metrics that there are."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from engine_numbers import FACTS, GAUGES, GPU_GAUGES
from prometheus_client.parser import text_string_to_metric_families

from streamserve.frontend.exposition import EngineNumbers, Exposition
from streamserve.frontend.families import Kind
from streamserve.frontend.metrics import Layout, Row

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\b(?:vllm:|streamserve:|http_|process_)[a-z0-9_]+")


def families() -> dict[str, Any]:
    """As a frontend shows them that has its supervisor, an engine, and has answered a request."""
    layout = Layout(("alice",))
    row = Row(layout, memoryview(bytearray(layout.row_bytes)))
    row.take_over(os.getpid())
    for family in layout.families:
        # Series that are shown once there is something in them.
        if family.name.startswith("http_") and family.kind is Kind.COUNTER:
            row.counter(family.name, *family.series[0]).add()
        elif family.name.startswith("http_"):
            row.histogram(family.name, *family.series[0]).observe(1.0)
    exposition = Exposition(layout, row.cells.cast("B"), "tiny", supervisor=os.getppid())
    text = exposition.render(EngineNumbers(FACTS, GAUGES | GPU_GAUGES), 0).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_panel_asks_for_what_there_is() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana" / "streamserve.json").read_text())
    samples = {sample.name for family in families().values() for sample in family.samples}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(asked) > 30
    for expression in asked:
        names = NAME.findall(expression)
        assert names, expression
        assert set(names) <= samples, expression
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_labels_in_panels_are_labels_of_the_metric() -> None:
    known = families()
    dashboard = json.loads((ROOT / "docs" / "grafana" / "streamserve.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                found = [
                    sample
                    for family in known.values()
                    for sample in family.samples
                    if sample.name in NAME.findall(target["expr"])
                ]
                assert any(label in sample.labels for sample in found), (panel["title"], label)


def test_every_metric_is_in_the_manual() -> None:
    manual = (ROOT / "docs" / "operations.md").read_text()
    for name in families():
        base = name.removesuffix("_last_seconds")
        assert base in manual or name in manual, name


# What dashboards of vLLM ask for: each sample, with the labels they choose and group by, without those that
# Prometheus adds. They are in its folder examples/observability: prometheus_grafana/grafana.json, and from
# dashboards/grafana performance_statistics, query_statistics, vllm_overview, vllm_instances, vllm_kv_cache,
# vllm_service_status. Left out are panels that are empty in vLLM as well if it runs without LoRA, speculative
# decoding, multimodal input, KV connectors and offloading, sleep mode and the flags of its rarer metrics.
MODEL = ("model_name", "engine")
HISTOGRAM = ("bucket", "sum", "count")
ASKED_BY_VLLM: dict[str, tuple[str, ...]] = {
    **{
        f"vllm:{name}_{part}": (*MODEL, "le") if part == "bucket" else MODEL
        for name in (
            "e2e_request_latency_seconds",
            "inter_token_latency_seconds",
            "iteration_tokens_total",
            "request_generation_tokens",
            "request_max_num_generation_tokens",
            "request_prefill_kv_computed_tokens",
            "request_prompt_tokens",
            "request_time_per_output_token_seconds",
            "time_to_first_token_seconds",
            *(f"request_{part}_time_seconds" for part in ("queue", "prefill", "decode")),
        )
        for part in HISTOGRAM
    },
    "vllm:num_requests_running": MODEL,
    "vllm:num_requests_waiting": MODEL,
    "vllm:num_requests_waiting_by_reason": (*MODEL, "reason"),
    "vllm:kv_cache_usage_perc": MODEL,
    "vllm:prefix_cache_queries_total": MODEL,
    "vllm:prefix_cache_hits_total": MODEL,
    "vllm:num_preemptions_total": MODEL,
    "vllm:prompt_tokens_total": MODEL,
    "vllm:prompt_tokens_cached_total": MODEL,
    "vllm:prompt_tokens_by_source_total": (*MODEL, "source"),
    "vllm:prompt_tokens_cached_by_source_total": (*MODEL, "source"),
    "vllm:generation_tokens_total": MODEL,
    "vllm:request_success_total": (*MODEL, "finished_reason"),
    "vllm:engine_sleep_state": (*MODEL, "sleep_state"),
    "vllm:cache_config_info": ("engine", "num_gpu_blocks", "block_size", "enable_prefix_caching"),
    "http_requests_total": ("handler", "status"),
    "http_request_duration_seconds_sum": ("handler",),
    "http_request_duration_seconds_count": ("handler",),
    "process_start_time_seconds": (),
    "process_cpu_seconds_total": (),
    "process_resident_memory_bytes": (),
    "process_open_fds": (),
    "process_max_fds": (),
}
# Values of labels that they ask for by name.
CHOSEN_BY_VLLM = {
    ("vllm:num_requests_waiting_by_reason", "reason"): {"capacity", "deferred"},
    ("vllm:prompt_tokens_by_source_total", "source"): {
        "local_compute", "local_cache_hit", "external_kv_transfer",
    },
    ("vllm:prompt_tokens_cached_by_source_total", "source"): {"device"},
    ("vllm:request_success_total", "finished_reason"): {"stop", "length", "abort", "error"},
    ("vllm:engine_sleep_state", "sleep_state"): {"awake", "discard_all"},
    ("vllm:time_to_first_token_seconds_bucket", "le"): {
        "0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0",
    },
    ("vllm:request_time_per_output_token_seconds_bucket", "le"): {
        "0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED_BY_VLLM)
def test_what_vllms_dashboards_ask_for_is_there(name: str) -> None:
    found = [sample for family in families().values() for sample in family.samples if sample.name == name]
    assert found
    for sample in found:
        assert set(ASKED_BY_VLLM[name]) <= set(sample.labels), sample


@pytest.mark.parametrize(("name", "label"), CHOSEN_BY_VLLM)
def test_what_vllms_dashboards_choose_by_value_is_there(name: str, label: str) -> None:
    samples = [sample for family in families().values() for sample in family.samples if sample.name == name]
    assert CHOSEN_BY_VLLM[name, label] <= {sample.labels[label] for sample in samples}
