"""Every known token of every slot, on the device: read by forwards and penalties, written by sampling."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from streamserve.engine.step import Int32Array
from streamserve.worker.device import zeros

Int64Array = npt.NDArray[np.int64]


class TokenPool:
    """A row of tokens for each slot; how many of them mean anything is the batch's business.

    Attributes:
        flat: int32[num_slots * width] on the device; row s begins at s * width.
        width: tokens in a row.
        device: where it is.

    Args:
        num_slots: rows.
        width: most tokens of one request.
        device: where the model runs.
    """

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        self.width = width
        self.device = device
        self.flat = zeros((num_slots * width,), torch.int32, device)

    def write(self, slot: int, tokens: Int32Array) -> None:
        """Puts `tokens` at the beginning of a row."""
        start = slot * self.width
        self.flat[start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)

    def read(self, slot: int, count: int) -> Int32Array:
        """A copy of the first `count` tokens of a row."""
        start = slot * self.width
        tokens: Int32Array = self.flat[start : start + count].cpu().numpy().copy()
        return tokens

    def at(self, slots: Int32Array, positions: npt.NDArray[np.integer]) -> torch.Tensor:
        """int64[n] on the device: the token of slots[i] at positions[i]."""
        index = slots.astype(np.int64) * self.width + positions
        return self.flat.index_select(0, self._to_device(index)).to(torch.int64)

    def spans(
        self, slots: Int32Array, begins: npt.NDArray[np.integer], ends: npt.NDArray[np.integer]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens at [begins[i], ends[i]) of slots[i], one slot after the other.

        Returns:
            int64[n], the tokens, and int64[n], which i each of them belongs to; both on the device.
        """
        lengths = (ends - begins).astype(np.int64)
        owners = np.repeat(np.arange(len(slots)), lengths)
        before = np.cumsum(lengths) - lengths
        within = np.arange(len(owners)) - (before - begins)[owners]
        return self.at(slots[owners], within), self._to_device(owners)

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
