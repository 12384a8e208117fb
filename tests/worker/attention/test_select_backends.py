"""What was chosen can be made, and the facts are those of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from flash_attn_reference import flash_attn_2, flash_attn_3

from loadtest.gpu_check.paged_steps import Heads, PagedRig
from streamserve.worker.attention.select import (
    AttentionFacts,
    choose_attention_backend,
    find_attention_facts,
)

pytestmark = pytest.mark.torch

EVERYTHING = frozenset({"triton", "flash_attn", "flash_attn_interface"})


@pytest.mark.parametrize(
    ("name", "packages", "made"),
    [
        ("torch", EVERYTHING, "TorchPagedAttention"),
        ("triton", EVERYTHING, "TritonPagedAttention"),
        ("flash_attn", EVERYTHING, "FlashAttention3"),
        ("flash_attn", EVERYTHING - {"flash_attn_interface"}, "FlashAttention2"),
    ],
)
def test_the_choice_is_made(
    monkeypatch: pytest.MonkeyPatch, name: str, packages: frozenset[str], made: str
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_2([]))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_3([]))
    facts = AttentionFacts("cuda", (9, 0), "bfloat16", 64, 256, packages)
    rig = PagedRig(Heads(), 256, torch.bfloat16, width=3, num_blocks=3)
    backend = choose_attention_backend(name, facts).create(rig.cache, rig.batch_shape, rig.variant)
    assert type(backend).__name__ == made
    assert backend.supports_block_size(256)


def test_facts_of_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder without an __init__ is no package: FlashAttention-4 leaves such a one behind."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    facts = find_attention_facts(torch.device("cpu"), torch.float32, 96, 16)
    assert (facts.device, facts.capability, facts.dtype) == ("cpu", (0, 0), "float32")
    assert (facts.head_dim, facts.block_size, facts.interprets_triton) == (96, 16, False)
    assert "flash_attn_interface" in facts.packages
    assert "flash_attn" not in facts.packages
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert find_attention_facts(torch.device("cpu"), torch.float32, 96, 16).interprets_triton
