"""Chooses tokens with the kernels of `sampler_kernels`: nothing is read back, nothing is waited for."""

from __future__ import annotations

import numpy as np
import torch

from streamserve.engine.step import Int32Array
from streamserve.worker.gumbel import row_keys
from streamserve.worker.link import DeviceLink, open_link
from streamserve.worker.sampler_kernels import (
    IS_GREEDY,
    KEY_0,
    KEY_1,
    LOG_MIN_P,
    NUM_COLUMNS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    cut_kernel,
    draw_kernel,
    pick_kernel,
)
from streamserve.worker.sampling_columns import SamplingColumns

# Tokens that a program holds at a time: as many as the registers of its warps take.
_CUT_BLOCK, _CUT_WARPS = 8192, 32
_DRAW_BLOCK, _DRAW_WARPS = 4096, 8


class TritonSampler:
    """Temperature, min_p, top_k, top_p and the draw, for the slots of a batch.

    Takes the same tokens as the torch code in `sampler`, but for rounding in the last digits and where
    tokens are equally likely.

    Args:
        columns: the slots' settings.
        vocab_size: width of the logits.
        device: where they are.
        link: the way there; None opens one.
    """

    def __init__(
        self,
        columns: SamplingColumns,
        vocab_size: int,
        device: torch.device,
        link: DeviceLink | None = None,
    ) -> None:
        self._link = link or open_link(device)
        self._columns = columns
        self._vocab_size = vocab_size
        self._device = device
        max_rows = len(columns.is_greedy)
        whole = max(16, _next_power_of_2(vocab_size))
        self._cut_block, self._draw_block = min(_CUT_BLOCK, whole), min(_DRAW_BLOCK, whole)
        self._num_parts = -(-vocab_size // self._draw_block)
        self._floors = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self._scores = torch.zeros(max_rows, self._num_parts, dtype=torch.float32, device=device)
        self._token_ids = torch.zeros(max_rows, self._num_parts, dtype=torch.int32, device=device)

    def choose(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """One token id for each row, int32[k] on the device. Hot: once a step.

        Args:
            logits: float32[k, vocab_size]; left as they are.
            slots: int32[k], whose settings apply to each row; at most as many as there are slots.
            positions: int32[k], known tokens of each row before this one.
        """
        count = len(slots)
        chosen = torch.empty(count, dtype=torch.int32, device=self._device)
        settings, has_floors = self._settings(slots, positions)
        if has_floors:
            cut_kernel[(count,)](
                logits,
                settings,
                self._floors,
                logits.stride(0),
                self._vocab_size,
                BLOCK=self._cut_block,
                num_warps=_CUT_WARPS,
            )
        draw_kernel[(count, self._num_parts)](
            logits,
            settings,
            self._floors,
            self._scores,
            self._token_ids,
            logits.stride(0),
            self._vocab_size,
            HAS_FLOORS=has_floors,
            BLOCK=self._draw_block,
            num_warps=_DRAW_WARPS,
        )
        pick_kernel[(count,)](
            self._scores,
            self._token_ids,
            chosen,
            self._num_parts,
            BLOCK=max(16, _next_power_of_2(self._num_parts)),
        )
        return chosen

    def _settings(self, slots: Int32Array, positions: Int32Array) -> tuple[torch.Tensor, bool]:
        """What the kernels read of each row, on the device; and whether any row cuts tokens off."""
        columns = self._columns
        rows = np.empty((len(slots), NUM_COLUMNS), dtype=np.int32)
        floats = rows.view(np.float32)
        greedy, min_p = columns.is_greedy[slots], columns.min_p[slots]
        top_k, top_p = columns.top_k[slots], columns.top_p[slots]
        rows[:, KEY_0 : KEY_1 + 1] = row_keys(columns.seed_keys[slots], positions).view(np.int32)
        floats[:, TEMPERATURE] = np.where(greedy, 1.0, columns.temperature[slots])
        with np.errstate(divide="ignore"):
            floats[:, LOG_MIN_P] = np.where(greedy, -np.inf, np.log(min_p))
        floats[:, TOP_P] = np.where(greedy, 1.0, top_p)
        rows[:, TOP_K] = np.where(greedy, self._vocab_size, top_k)
        rows[:, IS_GREEDY] = greedy
        cuts = ~greedy & ((top_k < self._vocab_size) | (top_p < 1.0) | (min_p > 0.0))
        return self._link.upload(rows), bool(cuts.any())


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
