"""The Triton kernels inside emulated graphs: what is baked into a launch holds for every later step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_rig import SHAPE, Rig, play

from streamserve.worker.attention.torch_paged import TorchPagedAttention
from streamserve.worker.attention.variant import AttentionVariant
from streamserve.worker.graphs.mode import CUDAGraphMode
from streamserve.worker.kv_cache import KVCache

pytest.importorskip("triton")

from streamserve.worker.attention import triton_paged
from streamserve.worker.attention.triton_paged import TritonPagedAttention

pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class OnTheTape:
    """A kernel whose launches are operations of torch, which the tape writes down with all their arguments.

    Attributes:
        kernel: what is launched.
        launches: every launch so far, without its tensors: (kernel, grid, arguments, constants).
    """

    kernel: Any
    launches: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            others = tuple(None if isinstance(x, torch.Tensor) else x for x in arguments)
            self.launches.append((self.kernel, grid, others, constants))
            torch.ops.streamserve_tests.launch(tensors, len(self.launches) - 1)

        return launch


@pytest.fixture
def kernels_on_the_tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    launches: list[Any] = []

    def launch(tensors: list[torch.Tensor], index: int) -> None:
        kernel, grid, others, constants = launches[index]
        remaining = iter(tensors)
        kernel[grid](*(next(remaining) if x is None else x for x in others), **constants)

    library = torch.library.Library("streamserve_tests", "DEF")
    library.define("launch(Tensor(a!)[] tensors, int index) -> ()")
    library.impl("launch", launch, "CPU")
    for name in ("store_kv_kernel", "chunk_kernel", "decode_kernel", "merge_splits_kernel"):
        monkeypatch.setattr(triton_paged, name, OnTheTape(getattr(triton_paged, name), launches))
    yield
    library._destroy()


def backend(cache: KVCache) -> TritonPagedAttention:
    """With contexts of up to four splits."""
    return TritonPagedAttention(cache, SHAPE, AttentionVariant(num_heads=4), split_size=64)


@pytest.mark.usefixtures("kernels_on_the_tape")
@pytest.mark.parametrize(
    ("mode", "num_steps"),
    [
        (CUDAGraphMode.FULL, 25),
        *(
            pytest.param(mode, 150, marks=(pytest.mark.heavy, pytest.mark.timeout(1_800)))
            for mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE)
        ),
    ],
)
def test_tokens_do_not_depend_on_the_mode(tiny_model: Path, mode: CUDAGraphMode, num_steps: int) -> None:
    truth = play(Rig(tiny_model, CUDAGraphMode.NONE, attention=TorchPagedAttention).execute, num_steps)
    assert min(truth.decodes, truth.mixed) > 2
    rig = Rig(tiny_model, mode, attention=backend, checks=True)
    assert play(rig.execute, num_steps) == truth
    assert rig.graphs is not None
    used = {kind for kind, count in rig.graphs.counters.steps.items() if count > 0}
    assert used >= {mode.decode, mode.mixed}
