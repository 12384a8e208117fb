"""The native kernels inside emulated graphs and outside of them: the tokens that plain torch takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph_rig import Rig, play
from native_kernels import WIDTHS, kernels

from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.attention.cpu_paged import CpuPagedAttention
from streamserve.worker.attention.torch_paged import TorchPagedAttention
from streamserve.worker.attention.variant import AttentionVariant
from streamserve.worker.graphs.mode import CUDAGraphMode, RuntimeMode
from streamserve.worker.kv_cache import KVCache
from streamserve.worker.models.llama import LlamaModel
from streamserve.worker.models.operations import NativeOperations

pytestmark = pytest.mark.torch


def backend(cache: KVCache) -> AttentionBackend:
    return CpuPagedAttention(cache, AttentionVariant(num_heads=4), kernels(WIDTHS[0]))


def on_kernels(model: LlamaModel) -> LlamaModel:
    model.use(NativeOperations(kernels(WIDTHS[0])))
    return model


@pytest.mark.parametrize(
    "mode",
    [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE],
)
def test_tokens_do_not_depend_on_the_mode(tiny_model: Path, mode: CUDAGraphMode) -> None:
    truth = play(Rig(tiny_model, CUDAGraphMode.NONE, attention=TorchPagedAttention).execute, 150)
    rig = Rig(tiny_model, mode, attention=backend, checks=True, stand_in=on_kernels)
    assert play(rig.execute, 150) == truth
    if rig.graphs is not None:
        used = {kind for kind, count in rig.graphs.counters.steps.items() if count > 10}
        assert used >= {mode.decode, mode.mixed} - {RuntimeMode.NONE}
