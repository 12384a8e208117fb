"""A server that runs from emulated graphs: what /metrics says of them."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server import PATIENCE_S, RunningServer, running_server, wait_until

ARGUMENTS = (
    "--device=cpu",
    "--dtype=float32",
    "--served-model-name=tiny",
    "--num-gpu-blocks-override=100",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=32",
    "--max-model-len=256",
    "--cudagraph-capture-sizes=1,2,4,16",
)


@pytest.fixture(scope="module")
def server(tiny_model):
    """With graphs for pieces of 1, 2, 4 and 16 tokens and for up to 4 decodes: seven in all."""
    with running_server(str(tiny_model), *ARGUMENTS, "--cudagraph-mode=FULL_AND_PIECEWISE") as server:
        yield server


def graph_samples(server: RunningServer) -> dict[str, float]:
    """Samples of the metrics of graphs, by name and the label that tells them apart."""
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).raise_for_status().text
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("streamserve:graph"):
            for sample in family.samples:
                kinds = [sample.labels[label] for label in ("mode", "state") if label in sample.labels]
                found[".".join([sample.name.removeprefix("streamserve:"), *kinds])] = sample.value
    return found


def complete(server: RunningServer, prompt: list[int], max_tokens: int) -> None:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()


def test_an_idle_server_captures_its_graphs(server):
    wait_until(lambda: graph_samples(server)["graphs.waiting"] == 0, "all graphs are captured")
    assert graph_samples(server)["graphs.captured"] == 7
    assert graph_samples(server)["graph_steps_total.NONE"] == 0


def test_steps_are_counted_by_how_they_ran(server):
    wait_until(lambda: graph_samples(server)["graphs.waiting"] == 0, "all graphs are captured")
    before = graph_samples(server)
    # A chunk of 32 tokens, for which there is no graph, one of 10, and 8 decodes.
    complete(server, list(range(5, 47)), 9)
    after = graph_samples(server)
    assert {name: after[name] - count for name, count in before.items() if after[name] != count} == {
        "graph_steps_total.NONE": 1,
        "graph_fallbacks_total": 1,
        "graph_steps_total.PIECEWISE": 1,
        "graph_padded_tokens_total": 6,
        "graph_steps_total.FULL": 8,
    }
