"""docs/grafana and docs/operations.md speak of metrics that there are, and of all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from engine_numbers import FACTS, GAUGES
from prometheus_client.parser import text_string_to_metric_families

from streamserve.frontend.exposition import EngineNumbers, Exposition
from streamserve.frontend.metrics import Layout

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\b(?:vllm:|streamserve:|http_)[a-z0-9_]+")


def families() -> dict[str, Any]:
    layout = Layout(("alice",))
    memory = memoryview(bytearray(layout.row_bytes))
    # Series that are shown once there is something in them.
    memory.cast("d")[layout.place("http_requests", ("none", "GET", "2xx"))] = 1.0
    memory.cast("d")[layout.place("http_request_duration_seconds", ("none", "GET"))] = 1.0
    text = Exposition(layout, memory, "tiny").render(EngineNumbers(FACTS, GAUGES), 0).decode()
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
