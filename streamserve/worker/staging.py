"""Host arrays that are also device tensors."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


class StagedArray:
    """A device tensor at a fixed address with a host array that fills it.

    On a CPU both are the same memory and `publish` costs one view. Elsewhere the host side is pinned and
    `publish` copies; the copy is waited for, so the host side may be written again right away.

    Attributes:
        host: what the next `publish` shows.
        device: the whole tensor.

    Args:
        length: number of elements.
        dtype: of both sides.
        device: where the tensor lives.
    """

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._staging = torch.zeros(length, dtype=dtype, pin_memory=not on_cpu)
        self.device = self._staging if on_cpu else torch.zeros(length, dtype=dtype, device=device)
        self.host: npt.NDArray[Any] = self._staging.numpy()

    def publish(self, count: int) -> torch.Tensor:
        """The first `count` elements on the device, as the host last wrote them."""
        view = self.device[:count]
        if self.device is not self._staging:
            view.copy_(self._staging[:count])
        return view
