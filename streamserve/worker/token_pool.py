"""Every known token of every slot, on the device: read by forwards and penalties, written by sampling."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from streamserve.engine.step import Int32Array
from streamserve.worker.device import zeros
from streamserve.worker.link import DeviceLink, open_link

Int64Array = npt.NDArray[np.int64]


class TokenPool:
    """A row of tokens for each slot; how many of them mean anything is the batch's business.

    Attributes:
        flat: int32[num_slots * width] on the device; row s begins at s * width.
        width: tokens in a row.
        device: where it is.
        link: the way there.

    Args:
        num_slots: rows.
        width: most tokens of one request.
        device: where the model runs.
        link: the way there; None opens one.
    """

    def __init__(
        self, num_slots: int, width: int, device: torch.device, link: DeviceLink | None = None
    ) -> None:
        self.width = width
        self.device = device
        self.link = link or open_link(device)
        self.flat = zeros((num_slots * width,), torch.int32, device)

    def write(self, slot: int, tokens: Int32Array) -> None:
        """Puts `tokens` at the beginning of a row."""
        start = slot * self.width
        self.flat[start : start + len(tokens)].copy_(self.link.upload(tokens))

    def read(self, slot: int, count: int) -> Int32Array:
        """A copy of the first `count` tokens of a row; waits for the device."""
        start = slot * self.width
        (tokens,) = self.link.fetch([self.flat[start : start + count]]).wait()
        return tokens.copy()

    def at(self, slots: Int32Array, positions: npt.NDArray[np.integer]) -> torch.Tensor:
        """int64[n] on the device: the token of slots[i] at positions[i]."""
        index = slots.astype(np.int64) * self.width + positions
        return self.flat.index_select(0, self.link.upload(index)).to(torch.int64)

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
        return self.at(slots[owners], within), self.link.upload(owners)
