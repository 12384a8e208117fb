"""The backend that graphs are proven on, against attention written out in float64."""

from __future__ import annotations

import pytest
import torch

from loadtest.gpu_check.paged_steps import UNTOUCHED, Heads, PagedRig
from streamserve.worker.attention import torch_padded
from streamserve.worker.attention.torch_padded import TorchPaddedAttention

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("page", [1, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("padding", [(0, 0), (3, 2), (5, 0)])
def test_mixed_steps(page: int, num_heads: int, num_kv_heads: int, padding: tuple[int, int]) -> None:
    width = 8 if page > 1 else 100
    rig = PagedRig(Heads(num_heads, num_kv_heads), page, width=width, num_blocks=width * 5)
    rows = [(21, 1), (0, 1), (0, 19), (15, 2), (32, 9)]
    out = rig.check(TorchPaddedAttention(rig.cache), rows, padding=padding)
    assert (out[len(out) - padding[0] :] == UNTOUCHED).all()


@pytest.mark.parametrize("max_seq_len", [None, 8 * 16])
def test_decodes(max_seq_len: int | None) -> None:
    rig = PagedRig(Heads(), 16)
    rows = [(31, 1), (0, 1), (99, 1), (16, 1)]
    rig.check(TorchPaddedAttention(rig.cache), rows, padding=(2, 2), max_seq_len=max_seq_len)


def test_tokens_are_gathered_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_padded, "_GATHERED_ELEMENTS", 3 * 128 * 2 * 64)
    rig = PagedRig(Heads(), 16)
    rig.check(TorchPaddedAttention(rig.cache), [(3, 10), (90, 1)], padding=(1, 1), max_seq_len=128)


def test_float16() -> None:
    rig = PagedRig(Heads(), 16, dtype=torch.float16)
    rig.check(TorchPaddedAttention(rig.cache), [(3, 10), (40, 1)], padding=(1, 1), tolerance=5e-3)


def test_a_step_of_padding_alone_writes_nothing() -> None:
    rig = PagedRig(Heads(), 16)
    before = [tensor.clone() for tensor in (*rig.cache.keys, *rig.cache.values)]
    out = rig.check(TorchPaddedAttention(rig.cache), [], padding=(3, 2), max_seq_len=16)
    assert (out == UNTOUCHED).all()
    for tensor, old in zip((*rig.cache.keys, *rig.cache.values), before, strict=True):
        assert torch.equal(tensor, old)
