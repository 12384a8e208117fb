"""A device on the CPU that is as late as a GPU may be, and objects to what would go wrong there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from streamserve.worker.graphs.tape import TapeGraphs
from streamserve.worker.link import DeviceLink, Fetched, HostArray

# Each of them waits for a GPU: it asks for a number, or for how many there are. `resolve_conj` is numpy and
# tolist, `lift_fresh` torch.tensor and from_numpy, whose memory is not pinned.
WAITING = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "_unique2",
        "argwhere",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "lift_fresh",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "resolve_conj",
        "unique_consecutive",
        "unique_dim",
    )
)


class WouldWaitError(AssertionError):
    """An operation within a step that would have the host wait for a GPU."""


class WrittenTooEarlyError(AssertionError):
    """Host memory was written while a GPU would still have been to read it."""


class NoSync(TorchDispatchMode):
    """Lets no operation through that would have the host wait for a GPU."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: skipping would import the compiler, which takes longer than all the rest."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name().split(".")[0]
        asks_how_many = name == "aten::where" and len(args) == 1
        if name in WAITING or asks_how_many or (name.startswith("aten::index") and _has_mask(args)):
            raise WouldWaitError(f"{func.name()} within a step")
        return func(*args, **(kwargs or {}))


def _has_mask(args: Sequence[Any]) -> bool:
    """Indexing with booleans asks how many are true."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in indices)


class EmulatedLink(DeviceLink):
    """Asked for a copy, it makes it as late as it may: when somebody waits for what came after.

    Work on the device is done at once, which nobody can tell from later, since it is done in order. A copy to
    the device is made at once, too, for the work behind it; but its source must be the same when it would be
    made at the latest. A copy to the host takes what is in its source when it is waited for.

    Attributes:
        num_sent: copies to the device.
        most_unread: steps that were on their way at a time.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.forbids_sync = True
        self.num_sent = 0
        self.most_unread = 0
        self._num_unread = 0
        self._sent: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._ends = [0, 0]

    @contextmanager
    def step(self) -> Iterator[None]:
        self.turn ^= 1
        self.wait_until(self._ends[self.turn])
        with NoSync() if self.forbids_sync else nullcontext():
            yield
        self._ends[self.turn] = self.num_sent

    def forward_begins(self) -> None:
        pass

    def staging_for(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(target), torch.zeros_like(target)

    def send(self, staging: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(staging)
        self.num_sent += 1
        self._sent.append((self.num_sent, staging, staging.clone()))

    def upload(self, array: HostArray) -> torch.Tensor:
        with _disable_current_modes():
            return torch.from_numpy(np.array(array))

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        if tensors:
            self._num_unread += 1
            self.most_unread = max(self.most_unread, self._num_unread)
        return _Late(self, tensors)

    def wait_until(self, number: int) -> None:
        """So many copies to the device have been made."""
        while self._sent and self._sent[0][0] <= number:
            _, staging, sent = self._sent.popleft()
            if not torch.equal(staging, sent):
                raise WrittenTooEarlyError("staging memory was written before it was copied")

    def synchronize(self) -> None:
        """All has been done."""
        self.wait_until(self.num_sent)

    def read(self) -> None:
        """A result has been waited for."""
        self._num_unread -= 1


class _Late:
    def __init__(self, link: EmulatedLink, sources: Sequence[torch.Tensor]) -> None:
        self._link, self._sources, self._number = link, sources, link.num_sent

    def wait(self) -> list[HostArray]:
        if self._sources:
            self._link.wait_until(self._number)
            self._link.read()
        return [source.numpy().copy() for source in self._sources]


class LateTapes(TapeGraphs):
    """Graphs on such a device: capturing waits for it, as it does on CUDA.

    Args:
        link: to the device.
    """

    def __init__(self, link: EmulatedLink) -> None:
        self._link = link

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.synchronize()
        yield
        self.synchronize()

    def synchronize(self) -> None:
        self._link.synchronize()
