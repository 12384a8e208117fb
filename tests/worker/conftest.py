"""A worker on the tiny model, made once a session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamserve.worker.spec import WorkerSpec

BLOCK_SIZE = 16
NUM_SLOTS = 32


def make_spec(folder: Path, **changes: Any) -> WorkerSpec:
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "auto",
        "dtype": "float32",
        "device": "cpu",
        "seed": 0,
        "max_model_len": 4096,
        "max_num_seqs": NUM_SLOTS,
        "max_num_batched_tokens": 512,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory": None,
        "num_blocks_override": 400,
        "cpu_threads": 1,
    }
    return WorkerSpec(**{**settings, **changes})


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors here are tiny: a second thread only waits, and on a busy machine waits long."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def spec_for() -> Callable[..., WorkerSpec]:
    """Makes a WorkerSpec with small sizes; keyword arguments change single fields."""
    return make_spec


@pytest.fixture(scope="session")
def tiny_worker(tiny_model: Path) -> Iterator[Any]:
    from streamserve.worker.worker import Worker

    worker = Worker(make_spec(tiny_model))
    worker.start(lambda what, share: None)
    yield worker
    worker.close()
