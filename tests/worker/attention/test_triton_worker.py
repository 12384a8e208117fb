"""A whole worker on the Triton kernels takes the tokens that one on plain torch takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from worker_driver import Driver

from streamserve.errors import ConfigError
from streamserve.sampling import SamplingParams
from streamserve.worker.spec import WorkerSpec
from streamserve.worker.worker import Worker

pytest.importorskip("triton")

pytestmark = pytest.mark.torch


def outputs_of(spec: WorkerSpec) -> list[list[int]]:
    """Prompts shorter and longer than a step's budget, greedy and seeded, one that joins late."""
    worker = Worker(spec)
    worker.start(lambda what, share: None)
    driver = Driver(
        worker.execute,
        num_slots=4,
        num_blocks=40,
        block_size=spec.block_size,
        budget=spec.max_num_batched_tokens,
    )
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    requests = [
        driver.add(range(3, 12), greedy),
        driver.add(range(5, 45), SamplingParams(max_tokens=3, seed=7)),
    ]
    for _ in range(2):
        driver.step()
    requests.append(driver.add(range(40, 57), greedy))
    driver.run()
    worker.close()
    return [request.output for request in requests]


def test_takes_the_same_tokens(tiny_model: Path, spec_for: Callable[..., WorkerSpec]) -> None:
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "max_model_len": 128,
        "num_blocks_override": 40,
    }
    on_torch, on_triton = (
        outputs_of(spec_for(tiny_model, attention_backend=backend, **settings))
        for backend in ("torch", "triton")
    )
    assert on_triton == on_torch


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_emulated_full_graphs_cannot_hold_its_kernels(
    tiny_model: Path, spec_for: Callable[..., WorkerSpec], mode: str
) -> None:
    spec = spec_for(tiny_model, attention_backend="triton", cudagraph_mode=mode)
    with pytest.raises(ConfigError, match=r"--attention-backend triton: .* use --cudagraph-mode PIECEWISE"):
        Worker(spec).start(lambda what, share: None)


def test_it_runs_between_emulated_graphs(tiny_model: Path, spec_for: Callable[..., WorkerSpec]) -> None:
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "max_model_len": 128,
        "num_blocks_override": 40,
    }
    graphs = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": (4, 24), "lazy_graphs": False}
    on_torch = outputs_of(spec_for(tiny_model, attention_backend="torch", **settings))
    assert outputs_of(spec_for(tiny_model, attention_backend="triton", **settings, **graphs)) == on_torch


def test_a_backend_that_cannot_work_is_refused(
    tiny_model: Path, spec_for: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="--attention-backend triton: Triton: needs a CUDA device"):
        Worker(spec_for(tiny_model, attention_backend="triton")).start(lambda what, share: None)
