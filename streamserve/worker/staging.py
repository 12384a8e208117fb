"""Host arrays that are also device tensors."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from streamserve.worker.link import DeviceLink


class StagedArray:
    """A device tensor at a fixed address with a host array that fills it.

    On a CPU both are the same memory. Elsewhere the host side is there twice, for steps in turns: the copy
    that `publish` asks for may still be on its way while the next step writes the other one. So within a step
    all is written before `publish`, which comes once at most.

    Attributes:
        device: the whole tensor.

    Args:
        length: number of elements.
        dtype: of both sides.
        link: to where the tensor lives.
    """

    def __init__(self, length: int, dtype: torch.dtype, link: DeviceLink) -> None:
        self._link = link
        self.device = torch.zeros(length, dtype=dtype, device=link.device)
        self._stagings = link.staging_for(self.device)
        self._hosts: list[npt.NDArray[Any]] = [staging.numpy() for staging in self._stagings]
        self._is_shared = self._stagings[0] is self.device

    @property
    def host(self) -> npt.NDArray[Any]:
        """What the next `publish` of this step shows; holds anything when the step begins."""
        return self._hosts[self._link.turn]

    def publish(self, count: int) -> torch.Tensor:
        """The first `count` elements on the device, as the host last wrote them. Hot."""
        view = self.device[:count]
        if not self._is_shared:
            self._link.send(self._stagings[self._link.turn][:count], view)
        return view
