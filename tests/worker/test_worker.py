"""Starting a worker: the facts it finds, and the errors it gives instead."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from worker_driver import Driver

from streamserve.engine.step import StepDiff
from streamserve.errors import ConfigError
from streamserve.sampling import SamplingParams
from streamserve.worker.kv_cache import allocate
from streamserve.worker.models.config import read_decoder_config
from streamserve.worker.spec import WorkerFacts, WorkerSpec
from streamserve.worker.worker import Worker

pytestmark = pytest.mark.torch

# 2 layers of K and V, 16 tokens, 2 heads of 16 float32.
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4


def start(spec: WorkerSpec) -> WorkerFacts:
    worker = Worker(spec)
    facts = worker.start(lambda what, share: None)
    worker.close()
    return facts


def test_facts_and_progress(tiny_model: Path, spec_for: Callable[..., WorkerSpec]) -> None:
    steps: list[tuple[str, float]] = []
    worker = Worker(spec_for(tiny_model, max_model_len=None))
    facts = worker.start(lambda what, share: steps.append((what, share)))
    weights = sum(p.stat().st_size for p in tiny_model.glob("*.safetensors"))
    assert facts == WorkerFacts(
        num_blocks=400,
        max_model_len=65536,
        vocab_size=512,
        eos_token_ids=(2, 0),
        dtype="float32",
        device="cpu",
        kv_block_bytes=BLOCK_BYTES,
        weights_bytes=facts.weights_bytes,
    )
    assert 0 < weights - facts.weights_bytes < 10_000
    assert steps[:2] == [("choosing kernels", 0.0), ("loading weights", 0.0)]
    assert steps[-1] == ("allocating the KV cache", 1.0)
    assert ("loading weights", 1.0) in steps
    worker.close()
    worker.close()
    with pytest.raises(AssertionError):
        worker.execute(StepDiff(step=1))


def test_auto_dtype_and_device(tiny_model: Path, spec_for: Callable[..., WorkerSpec]) -> None:
    facts = start(spec_for(tiny_model, dtype="auto", device="auto"))
    has_cuda = torch.cuda.is_available()
    assert (facts.device, facts.dtype) == (("cuda", "bfloat16") if has_cuda else ("cpu", "float32"))


def test_dummy_weights_run(tiny_model: Path, tmp_path: Path, spec_for: Callable[..., WorkerSpec]) -> None:
    """Only config.json is needed, and a seed gives the same text each time."""
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    outputs = []
    for seed in (1, 1, 2):
        worker = Worker(spec_for(tmp_path, load_format="dummy", seed=seed))
        worker.start(lambda what, share: None)
        driver = Driver(worker.execute, num_slots=4, num_blocks=40, block_size=16, budget=64)
        request = driver.add([5, 6, 7], SamplingParams(max_tokens=30, temperature=0.0))
        driver.run()
        outputs.append(request.output)
        worker.close()
    assert outputs[0] == outputs[1] != outputs[2]
    assert len(set(outputs[0])) > 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_cache_memory": 10 * BLOCK_BYTES + 5}, 10),
        ({"kv_cache_memory": 1 << 30}, 32 * 4096 // 16),
        ({"kv_cache_memory": 1 << 30, "max_num_seqs": 1, "max_model_len": 100}, 7),
        ({"kv_cache_memory": 1 << 30, "max_num_seqs": 1, "max_model_len": 1}, 2),
        ({"kv_cache_memory": 10 * BLOCK_BYTES, "num_blocks_override": 33}, 33),
        ({}, 32 * 4096 // 16),
    ],
)
def test_number_of_blocks(
    tiny_model: Path, spec_for: Callable[..., WorkerSpec], changes: dict[str, int], expected: int
) -> None:
    assert start(spec_for(tiny_model, **{"num_blocks_override": None, **changes})).num_blocks == expected


def test_default_memory_is_a_quarter_of_what_is_free(
    tiny_model: Path, spec_for: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamserve.worker.device.available_bytes", lambda: 400 * BLOCK_BYTES)
    assert start(spec_for(tiny_model, num_blocks_override=None)).num_blocks == 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 65537}, "--max-model-len 65537.*65536"),
        ({"kv_cache_memory": 2 * BLOCK_BYTES - 1, "num_blocks_override": None}, f"{2 * BLOCK_BYTES} bytes"),
        ({"num_blocks_override": 1}, "--num-gpu-blocks-override"),
        ({"num_blocks_override": 10**10}, "only .* are free"),
        ({"device": "tpu"}, "--device tpu"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"cpu_threads": 100_000_000}, "--cpu-threads 100000000: at most [0-9]+ on this machine"),
        ({"max_num_seqs": 10**15}, f"no memory for {10**15} requests.*--max-num-seqs or --max-model-len"),
    ],
)
def test_errors_name_the_option(
    tiny_model: Path, spec_for: Callable[..., WorkerSpec], changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        start(spec_for(tiny_model, **changes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device(tiny_model: Path, spec_for: Callable[..., WorkerSpec]) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        start(spec_for(tiny_model, device="cuda"))


def test_weights_that_do_not_fit(
    tiny_model: Path, spec_for: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamserve.worker.device.available_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match="do not fit"):
        start(spec_for(tiny_model))


def test_cache_memory_is_committed_when_it_is_used(tiny_model: Path) -> None:
    config = read_decoder_config(tiny_model)
    before = resident_bytes()
    cache = allocate(config, (1 << 30) // BLOCK_BYTES, 16, torch.float32, torch.device("cpu"))
    assert resident_bytes() - before < 64 << 20
    assert cache.keys[0].shape == ((1 << 30) // BLOCK_BYTES, 16, 2, 16)
    assert not cache.values[1][5].any()
    cache.keys[1][3] = 1.0
    assert cache.keys[1][3].all()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
