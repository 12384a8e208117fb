"""Every kernel compiles to machine code for the GPUs it is meant for, as it is launched; no GPU is needed.

The interpreter takes much that the compiler does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_launches import KernelLaunches, Launch

from loadtest.gpu_check.paged_steps import Heads, PagedRig
from streamserve.sampling import SamplingParams
from streamserve.worker.attention.metadata import PagedMetadata
from streamserve.worker.sampling_columns import SamplingColumns

pytest.importorskip("triton")

from streamserve.worker import triton_sampler
from streamserve.worker.attention import triton_paged

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parent / "programs" / "compile_kernels.py"
CPU = torch.device("cpu")
# compute capability → bytes of shared memory that a program may have.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def job(launch: Launch, capability: int) -> dict[str, Any]:
    """How Triton would see the arguments of a launch."""
    names = launch.kernel.arg_names
    signature: dict[str, str] = {}
    divisible = []
    for name, value in zip(names, launch.arguments, strict=False):
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            # Each begins with an allocation or with a head, at a multiple of 16 bytes.
            divisible.append(name)
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                divisible.append(name)
    constants = {name: value for name, value in launch.constants.items() if name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    assert set(signature) == set(names)
    return {
        "module": launch.kernel.fn.__module__,
        "kernel": launch.kernel.fn.__name__,
        "capability": capability,
        "signature": {name: signature[name] for name in names},
        "constants": constants,
        "divisible": divisible,
        "options": {name: value for name, value in launch.constants.items() if name not in names},
    }


def compile_all(jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, PROGRAM],
        input=json.dumps(jobs),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    results: list[dict[str, Any]] = json.loads(result.stdout)
    assert len(results) == len(jobs)
    for one, done in zip(jobs, results, strict=True):
        assert done["shared"] <= SHARED[one["capability"]]
    return results


def attention_launches(
    monkeypatch: pytest.MonkeyPatch, heads: Heads, page: int, dtype: torch.dtype, capability: int
) -> list[Launch]:
    """Those of a step of decodes and chunks."""
    rig = PagedRig(heads, page, dtype, width=512 // page, num_blocks=4)
    backend = triton_paged.TritonPagedAttention(
        rig.cache, rig.batch_shape, rig.variant, shared_bytes=SHARED[capability]
    )
    numbers = {
        "query_start": torch.zeros(5, dtype=torch.int32),
        "seq_lens": torch.zeros(4, dtype=torch.int32),
        "block_table": torch.zeros(4, rig.width, dtype=torch.int32),
        "slot_mapping": torch.zeros(9, dtype=torch.int64),
    }
    q, k, v = (rig.tensor(9, count, heads.head_dim) for count in (heads.num_heads, *[heads.num_kv_heads] * 2))
    with monkeypatch.context() as patched:
        launches = KernelLaunches(patched, triton_paged)
        step = PagedMetadata(9, 4, 5, 512, **numbers)
        backend.forward(q, k, v, q.flatten(1), layer=0, metadata=step)
    return launches.noted


def sampler_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Those of a step with a row that has a filter."""
    columns = SamplingColumns(4, 50_000, ())
    columns.put(0, SamplingParams(max_tokens=9, top_p=0.9), 0)
    slots = np.arange(4, dtype=np.int32)
    with monkeypatch.context() as patched:
        launches = KernelLaunches(patched, triton_sampler)
        triton_sampler.TritonSampler(columns, 50_000, CPU).choose(torch.zeros(4, 50_000), slots, slots)
    return launches.noted


def test_kernels_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launches = attention_launches(monkeypatch, Heads(8, 2, 128), 64, torch.bfloat16, 90)
    launches += sampler_launches(monkeypatch)
    results = compile_all([job(launch, 90) for launch in launches], tmp_path)
    on_tensor_cores = {done["kernel"] for done in results if done["uses_tensor_cores"]}
    assert on_tensor_cores == {"chunk_kernel", "decode_kernel"}
    assert {done["kernel"] for done in results} == on_tensor_cores | {
        *("store_kv_kernel", "merge_splits_kernel"),
        *("cut_kernel", "draw_kernel", "pick_kernel"),
    }


@pytest.mark.heavy
@pytest.mark.parametrize("capability", SHARED)
def test_all_variants_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int) -> None:
    """Pages below and above a tile, every format, wide and odd heads, windows and caps."""
    launches = sampler_launches(monkeypatch)
    for heads, page, dtype in (
        (Heads(32, 8, 128), 16, torch.bfloat16),
        (Heads(9, 3, 64), 16, torch.float16),
        (Heads(16, 1, 256), 256, torch.bfloat16),
        (Heads(4, 4, 80, window=100, soft_cap=30.0), 32, torch.bfloat16),
        (Heads(128, 1, 256), 16, torch.bfloat16),
        (Heads(8, 2, 128), 64, torch.float32),
        (Heads(8, 2, 256), 64, torch.float32),
    ):
        launches += attention_launches(monkeypatch, heads, page, dtype, capability)
    compile_all([job(launch, capability) for launch in launches], tmp_path)
