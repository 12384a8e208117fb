"""Attention kernels on the device against attention written out in float64."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loadtest.gpu_check.paged_steps import Heads, PagedRig
from loadtest.gpu_check.results import Record
from loadtest.gpu_check.setting import Setting
from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.attention.triton_paged import TritonPagedAttention

Rows = Sequence[tuple[int, int]]
MakeBackend = Callable[[PagedRig], AttentionBackend]

# A float32 result has that many right digits; a 16-bit one is rounded to fewer.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True, slots=True)
class Case:
    """A layer and a cache."""

    heads: Heads
    page: int
    dtype: torch.dtype


def steps_for(page: int, longest: int) -> dict[str, tuple[Rows, tuple[int, int]]]:
    """Steps of every kind, as (requests, rows and requests of padding).

    Args:
        page: tokens in a block.
        longest: tokens in the cache of the longest request.
    """
    decodes = [(0, 1), (page - 1, 1), (page, 1), (longest // 2, 1), (longest, 1)]
    return {
        "decodes": (decodes, (3, 3)),
        "one decode": ([(longest, 1)], (0, 0)),
        "chunks": ([(0, 70), (page - 1, 2), (longest // 2, 33)], (0, 0)),
        "everything": ([(page + 5, 1), (0, 1), (0, 19), (longest, 1), (longest // 2, 9)], (3, 2)),
    }


def run(setting: Setting, record: Record, shared: dict[str, Any]) -> None:
    """See `SectionModule.run`."""
    if importlib.util.find_spec("triton") is None:
        record.skip("Triton is not installed")
        return
    for case in _cases(setting):
        split = 64 if setting.is_rehearsal else 256

        def triton(rig: PagedRig, split: int = split) -> AttentionBackend:
            return TritonPagedAttention(rig.cache, rig.batch_shape, rig.variant, split)

        _check(setting, record, "Triton", triton, case)
    for label, make, page in _packages(setting):
        for heads in (Heads(32, 8, 128), Heads(8, 2, 64, window=50)):
            _check(setting, record, label, make, Case(heads, page, torch.bfloat16))


def _cases(setting: Setting) -> list[Case]:
    """Pages below, at and above a tile; all number formats; odd heads, windows and caps."""
    if setting.is_rehearsal:
        # The interpreter multiplies no matrices of bfloat16.
        return [
            Case(Heads(4, 2, 64), 16, torch.float32),
            Case(Heads(6, 2, 64, window=40), 32, torch.float16),
        ]
    bf16 = torch.bfloat16
    return [
        Case(Heads(32, 8, 128), 64, bf16),
        Case(Heads(32, 8, 128), 16, bf16),
        Case(Heads(8, 8, 128), 256, bf16),
        Case(Heads(9, 3, 64), 16, torch.float16),
        Case(Heads(8, 1, 128), 32, bf16),
        Case(Heads(8, 2, 128, window=100), 64, bf16),
        Case(Heads(4, 4, 80, soft_cap=30.0), 32, bf16),
        Case(Heads(8, 2, 128), 64, torch.float32),
    ]


def _packages(setting: Setting) -> list[tuple[str, MakeBackend, int]]:
    """Backends of the packages that are installed."""
    found: list[tuple[str, MakeBackend, int]] = []
    if setting.is_rehearsal:
        return found
    if importlib.util.find_spec("flash_attn") is not None:
        from streamserve.worker.attention.flash_attn import FlashAttention2

        found.append(
            ("FlashAttention-2", lambda rig: FlashAttention2(rig.cache, rig.batch_shape, rig.variant), 256)
        )
    if importlib.util.find_spec("flash_attn_interface") is not None:
        from streamserve.worker.attention.flash_attn import FlashAttention3

        found.append(
            ("FlashAttention-3", lambda rig: FlashAttention3(rig.cache, rig.batch_shape, rig.variant), 64)
        )
    return found


def _check(setting: Setting, record: Record, label: str, make: MakeBackend, case: Case) -> None:
    """All steps of a case; K and V must be in their slots bit for bit, and padding left alone."""
    longest = 150 if setting.is_rehearsal else 2000
    width = -(-(longest + 128) // case.page)
    problems = []
    steps = steps_for(case.page, longest)
    for name, (rows, padding) in steps.items():
        rig = PagedRig(
            case.heads,
            case.page,
            case.dtype,
            width=width,
            num_blocks=4 * width + 8,
            device=torch.device(setting.device),
        )
        # As in a FULL graph, the longest context that could be.
        longest_known = width * case.page if padding[1] else None
        try:
            rig.check(
                make(rig),
                rows,
                padding=padding,
                max_seq_len=longest_known,
                tolerance=_TOLERANCES[case.dtype],
            )
        except AssertionError as error:
            problems.append(f"{name}: {' '.join(str(error).split())[:200]}")
    heads, dtype = case.heads, str(case.dtype).removeprefix("torch.")
    about = f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.head_dim}, pages of {case.page}, {dtype}"
    about += f", window {heads.window}" if heads.window else ""
    about += f", cap {heads.soft_cap:g}" if heads.soft_cap else ""
    record.check(f"{label}: {about}", not problems, "; ".join(problems) or f"{len(steps)} steps")
