"""The attention kernels against attention written out in float64, at every width of vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import WIDTHS, kernels

from loadtest.gpu_check.paged_steps import UNTOUCHED, Heads, PagedRig
from streamserve.worker.native.operators import Operators

pytestmark = pytest.mark.torch

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class OnPagedMetadata:
    """Calls the kernel with what a `PagedRig` says of a step.

    Attributes:
        rig: whose cache it is.
        operators: the kernels.
    """

    rig: PagedRig
    operators: Operators

    def forward(self, q: Any, k: Any, v: Any, out: Any, *, layer: int, metadata: Any) -> None:
        cache, variant = self.rig.cache, self.rig.variant
        slots = torch.arange(metadata.num_reqs, dtype=torch.int32)
        self.operators.attend(
            *(q, k, v, out, cache.keys[layer], cache.values[layer], metadata.slot_mapping),
            *(metadata.block_table, slots, metadata.query_start, metadata.seq_lens),
            *(variant.sliding_window, variant.soft_cap, self.rig.heads.head_dim**-0.5),
        )


def check(
    target: tuple[str, ...], heads: Heads, page: int, rows: list[tuple[int, int]], **how: Any
) -> torch.Tensor:
    """One step of requests with (tokens in the cache, tokens to run)."""
    dtype = how.pop("dtype", torch.float32)
    width = max(-(-(before + new) // page) for before, new in rows)
    rig = PagedRig(heads, page, dtype, width, len(rows) * width + 3)
    backend: Any = OnPagedMetadata(rig, kernels(target))
    return rig.check(backend, rows, tolerance=TOLERANCE[dtype], **how)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Decodes and chunks, around the edges of tiles and splits and anywhere."""
    edges = st.sampled_from([0, 1, 15, 16, 63, 64, 65, 254, 255, 256, 257, 511, 512])
    before = edges | st.integers(0, 800)
    new = st.just(1) | st.integers(1, 40) | st.sampled_from([1, 2, 63, 64, 65, 129])
    return draw(st.lists(st.tuples(before, new), min_size=1, max_size=6))


@settings(max_examples=60, deadline=None)
@given(
    target=st.sampled_from(WIDTHS),
    rows=steps(),
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 36, 64, 80, 128]),
    page=st.sampled_from([1, 5, 16, 64]),
    window=st.just(0) | st.integers(1, 300),
    soft_cap=st.sampled_from([0.0, 0.0, 0.7, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_step(
    target: tuple[str, ...],
    rows: list[tuple[int, int]],
    group: int,
    num_kv_heads: int,
    head_dim: int,
    page: int,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
) -> None:
    heads = Heads(group * num_kv_heads, num_kv_heads, head_dim, window, soft_cap)
    check(target, heads, page, rows, dtype=dtype)


@pytest.mark.parametrize("target", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_contexts_and_wide_heads(target: tuple[str, ...], dtype: torch.dtype) -> None:
    check(target, Heads(4, 1, 256), 16, [(1999, 1), (1000, 33), (255, 1)], dtype=dtype)


@pytest.mark.parametrize("target", WIDTHS, ids=str)
def test_padding_is_left_alone(target: tuple[str, ...]) -> None:
    out = check(target, Heads(), 16, [(70, 1), (0, 3)], padding=(4, 4))
    assert (out[-4:] == UNTOUCHED).all()


@pytest.mark.parametrize("target", WIDTHS, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_request_does_not_depend_on_its_company(target: tuple[str, ...], num_threads: int) -> None:
    """Bit for bit, and not on the number of threads either."""
    alone = check(target, Heads(9, 3), 16, [(700, 1)])[0]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for mates in ([], [(90, 1), (3, 1)], [(20, 30), (5, 1)], [(i, 1) for i in range(40)]):
            out = check(target, Heads(9, 3), 16, [(700, 1), *mates])
            assert torch.equal(out[0], alone)
    finally:
        torch.set_num_threads(before)


def test_numbers_that_overflow_stay_with_their_request() -> None:
    rows = [(40, 1), (20, 1)]
    rig = PagedRig(Heads(), 16, torch.float32, 4, 12)
    backend: Any = OnPagedMetadata(rig, kernels(WIDTHS[0]))
    # What no request has in its blocks is infinite there.
    out = rig.check(backend, rows)
    assert out.isfinite().all()


def test_numbers_may_lie_in_any_order() -> None:
    """As what torch.compile makes may."""
    rig = PagedRig(Heads(), 16)
    backend = OnPagedMetadata(rig, kernels(WIDTHS[0]))
    step = rig._step([(0, 3), (0, 1)], (0, 0), None)
    heads = rig.tensor(4, 8, 64)
    outs = []
    for laid_out in (heads, heads.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        q, k, v = laid_out.split((4, 2, 2), 1)
        outs.append(torch.empty(4, 256))
        backend.forward(q, k, v, outs[-1], layer=0, metadata=step)
    assert not q.is_contiguous()
    assert torch.equal(*outs)
