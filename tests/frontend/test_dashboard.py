"""Our dashboard and alerts, docs/operations.md and vLLM's dashboards speak of metrics that there are."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_numbers import FACTS, GAUGES, GPU_GAUGES
from prometheus_client.parser import text_string_to_metric_families

from streamserve.frontend.exposition import EngineNumbers, Exposition
from streamserve.frontend.families import Kind
from streamserve.frontend.metrics import Layout, Row

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "streamserve.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
NAME = re.compile(r"\b(?:vllm:|streamserve:|http_|process_)[a-z0-9_]+")


def families() -> dict[str, Any]:
    """As a frontend shows them that has its supervisor, an engine, and has answered a request."""
    layout = Layout(("alice",))
    row = Row(layout, memoryview(bytearray(layout.row_bytes)))
    row.take_over(os.getpid())
    for family in layout.families:
        # Series that are shown once there is something in them.
        if family.name.startswith("http_") and family.kind is Kind.COUNTER:
            for values in family.series:
                row.counter(family.name, *values).add()
        elif family.name.startswith("http_"):
            row.histogram(family.name, *family.series[0]).observe(1.0)
    exposition = Exposition(layout, row.cells.cast("B"), "tiny", supervisor=os.getppid())
    text = exposition.render(EngineNumbers(FACTS, GAUGES | GPU_GAUGES), 0).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def panel_queries() -> list[tuple[str, dict[str, Any]]]:
    """Each query of the dashboard with the title of its panel."""
    return [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def samples() -> dict[str, list[Any]]:
    """All that the server shows, by name."""
    found: dict[str, list[Any]] = {}
    for family in families().values():
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@pytest.fixture(scope="module")
def shown() -> dict[str, list[Any]]:
    return samples()


def assert_there_is(expression: str, shown: dict[str, list[Any]]) -> None:
    """Every metric of `expression` exists, and with the labels that it is chosen and summed by."""
    names = NAME.findall(expression)
    assert names, expression
    assert set(names) <= shown.keys(), expression
    # Prometheus adds these two. le is summed by where buckets are, and only there.
    known = {"instance", "job"} | {
        label for name in names for sample in shown[name] for label in sample.labels
    }
    summed = {
        label.strip() for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(",")
    }
    assert summed <= known, expression
    for name, chosen in re.findall(r"([a-z0-9_:]+)\{([^}]*)\}", expression):
        for label, operator, value in re.findall(r'(\w+)(=~|!~|=|!=)"([^"]*)"', chosen):
            values = {sample.labels.get(label) for sample in shown[name]}
            assert None not in values, (name, label)
            # A value that never comes up finds nothing, for ever.
            if operator in ("=", "!="):
                assert value in values, (name, label, value)


def test_every_panel_asks_for_what_there_is(shown: dict[str, list[Any]]) -> None:
    queries = panel_queries()
    assert len(queries) > 30
    for _, target in queries:
        assert_there_is(target["expr"], shown)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_the_dashboard_shows_what_an_operator_looks_for() -> None:
    asked = " ".join(target["expr"] for _, target in panel_queries())
    for name in (
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:generation_tokens_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:request_success_total",
        "http_requests_total",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "streamserve:graph_steps_total",
        "streamserve:frontend_restarts_total",
        "streamserve:streams_detached",
        "streamserve:streams_resumed_total",
        "streamserve:streams_expired_total",
        "streamserve:streams_not_kept_total",
        "streamserve:resume_buffer_bytes",
    ):
        assert name in asked, name


def test_labels_in_panels_are_labels_of_the_metric(shown: dict[str, list[Any]]) -> None:
    for title, target in panel_queries():
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            found = [sample for name in NAME.findall(target["expr"]) for sample in shown[name]]
            assert any(label in sample.labels for sample in found), (title, label)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_asks_for_what_there_is(rule: dict[str, Any], shown: dict[str, list[Any]]) -> None:
    # Whether a scrape worked is Prometheus' own.
    if rule["alert"] != "StreamserveDown":
        assert_there_is(rule["expr"], shown)
    assert rule["labels"]["severity"] in ("warning", "critical")
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert label == "instance" or label in rule["expr"], label


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
