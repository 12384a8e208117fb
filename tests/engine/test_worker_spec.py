"""Defaults that depend on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.bootstrap import ResolvedModel
from streamserve.config import CacheConfig, Config, WorkerConfig
from streamserve.engine import process
from streamserve.engine.process import worker_spec
from streamserve.errors import ConfigError

MODEL = ResolvedModel(path=Path("/model"), name="model", dtype="auto", load_format="auto")


@pytest.mark.parametrize(
    ("device", "backend", "asked", "block_size"),
    [
        ("cpu", "auto", None, 16),
        ("cuda", "auto", None, 64),
        ("cuda", "triton", None, 64),
        ("cuda", "flash_attn", None, 256),
        ("cuda", "flash_attn", 512, 512),
        ("cpu", "auto", 32, 32),
    ],
)
def test_blocks_suit_the_attention_backend(
    device: str, backend: str, asked: int | None, block_size: int
) -> None:
    config = replace(
        Config(), cache=CacheConfig(block_size=asked), worker=WorkerConfig(attention_backend=backend)
    )
    spec = worker_spec(config, device, MODEL)
    assert spec.block_size == block_size
    assert spec.attention_backend == backend


@pytest.mark.parametrize(
    ("device", "asked", "executor"),
    [
        ("cpu", None, "InlineExecutor"),
        ("cpu", False, "InlineExecutor"),
        ("cpu", True, "ThreadedExecutor"),
        ("cuda", None, "OverlappedExecutor"),
        ("cuda", True, "OverlappedExecutor"),
        ("cuda", False, "InlineExecutor"),
    ],
)
def test_steps_overlap_where_it_pays(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: bool | None, executor: str
) -> None:
    for name in ("InlineExecutor", "OverlappedExecutor", "ThreadedExecutor"):
        monkeypatch.setattr(process, name, lambda spec, name=name: name)
    assert process.choose_executor(worker_spec(Config(), device, MODEL), asked) == executor


def test_a_gpu() -> None:
    spec = worker_spec(Config(), "cuda", MODEL)
    assert (spec.gpu_memory_utilization, spec.debug_no_sync) == (0.9, False)
    asked = replace(
        Config(), cache=CacheConfig(gpu_memory_utilization=0.5), worker=WorkerConfig(debug_no_sync=True)
    )
    spec = worker_spec(asked, "cuda", MODEL)
    assert (spec.gpu_memory_utilization, spec.debug_no_sync) == (0.5, True)


def test_graphs() -> None:
    asked = WorkerConfig(cudagraph_mode="FULL", cudagraph_capture_sizes=("1", "16", "8"), lazy_graphs=False)
    spec = worker_spec(replace(Config(), worker=asked), "cuda", MODEL)
    given = (spec.cudagraph_mode, spec.cudagraph_capture_sizes, spec.lazy_graphs)
    assert given == ("FULL", (1, 16, 8), False)
    eager = replace(asked, enforce_eager=True)
    assert worker_spec(replace(Config(), worker=eager), "cuda", MODEL).cudagraph_mode == "NONE"
    default = worker_spec(Config(), "cuda", MODEL)
    assert (default.cudagraph_mode, default.cudagraph_capture_sizes, default.lazy_graphs) == (None, (), True)
    wrong = replace(asked, cudagraph_capture_sizes=("8", "many"))
    with pytest.raises(ConfigError, match="--cudagraph-capture-sizes: 'many' is not a number"):
        worker_spec(replace(Config(), worker=wrong), "cuda", MODEL)
