"""The flash-attn backends against a stand-in for the packages that is as strict as they are."""

from __future__ import annotations

import sys

import pytest
import torch
from flash_attn_reference import flash_attn_2, flash_attn_3

from loadtest.gpu_check.paged_steps import Heads, PagedRig
from streamserve.worker.attention.base import GraphSupport

pytest.importorskip("triton")

from streamserve.worker.attention.flash_attn import FlashAttention2, FlashAttention3

pytestmark = pytest.mark.torch

STEPS = {
    "decodes": [(300, 1), (0, 1), (255, 1), (256, 1)],
    "first chunks": [(0, 20), (0, 2)],
    "later chunks": [(250, 20), (10, 3)],
    "everything": [(3, 1), (300, 10), (0, 7), (256, 1)],
}
SHAPES = [Heads(4, 2, 64), Heads(8, 1, 128), Heads(3, 3, 64, window=50), Heads(4, 2, 64, soft_cap=0.5)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Functions of the packages, in the order of their calls."""
    noted: list[str] = []
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_2(noted))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_3(noted))
    return noted


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_flash_attention_2(calls: list[str], heads: Heads, rows: list[tuple[int, int]]) -> None:
    rig = PagedRig(heads, 256, torch.bfloat16, width=3, num_blocks=12)
    backend = FlashAttention2(rig.cache, rig.batch_shape, rig.variant)
    rig.check(backend, rows, tolerance=1e-2)
    assert calls == ["kvcache" if rows == STEPS["decodes"] else "varlen"]


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(("heads", "page"), [*((heads, 64) for heads in SHAPES), (SHAPES[0], 5)], ids=str)
def test_flash_attention_3(calls: list[str], heads: Heads, page: int, rows: list[tuple[int, int]]) -> None:
    rig = PagedRig(heads, page, torch.bfloat16, width=320 // page, num_blocks=1200 // page)
    rig.check(FlashAttention3(rig.cache, rig.batch_shape, rig.variant), rows, tolerance=1e-2)
    assert calls == ["kvcache"]


@pytest.mark.parametrize(("backend", "page"), [(FlashAttention2, 256), (FlashAttention3, 16)])
def test_decodes_padded_to_a_graph(
    calls: list[str], backend: type[FlashAttention2 | FlashAttention3], page: int
) -> None:
    """As many rows of padding as requests of padding, and the longest context that could be."""
    rig = PagedRig(Heads(), page, torch.float16, width=512 // page, num_blocks=2048 // page)
    bound = backend(rig.cache, rig.batch_shape, rig.variant)
    rig.check(bound, [(300, 1), (7, 1), (0, 1)], padding=(5, 5), max_seq_len=512, tolerance=2e-3)
    assert calls == ["kvcache"]


def test_lengths_of_an_earlier_step_are_forgotten(calls: list[str]) -> None:
    rig = PagedRig(Heads(), 256, torch.float16, width=3, num_blocks=12)
    backend = FlashAttention2(rig.cache, rig.batch_shape, rig.variant)
    for rows in ([(300, 9), (4, 5), (6, 1)], [(2, 3)], [(9, 2), (270, 8)]):
        rig.check(backend, rows, tolerance=2e-3)
    assert calls == ["varlen"] * 3


def test_they_declare_what_they_can() -> None:
    assert FlashAttention2.graph_support is GraphSupport.UNIFORM_SINGLE_TOKEN
    assert FlashAttention3.graph_support is GraphSupport.UNIFORM_BATCH
    assert [size for size in range(600) if FlashAttention2.supports_block_size(size)] == [256, 512]
    assert [size for size in range(3) if FlashAttention3.supports_block_size(size)] == [1, 2]
