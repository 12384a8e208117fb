"""What travels between the host and the device, and when the host may touch it again.

A GPU works through what it is asked for while the host has long gone on: asked to copy, it reads the host's
memory later. Nothing here waits for it but `Fetched.wait`, for results, and the begin of a step, which waits
for the step before the last one: staging memory is there twice, and used in turns. By then the results of
that step have been read, as a rule, so there is nothing to wait for.

On a CPU all of this is nothing at all: both sides are the same memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch

HostArray = npt.NDArray[Any]


@dataclass(slots=True)
class Gaps:
    """How long the device was idle between two steps, the second of which was launched before the first was
    read: it waited for the host, not for requests. Being sent what the second is about counts as idle.

    Attributes:
        count: pairs of such steps.
        total_ns: of idle time between them.
    """

    count: int = 0
    total_ns: int = 0


class Fetched(Protocol):
    """Copies on their way to the host."""

    def wait(self) -> list[HostArray]:
        """The copies, once they have been made."""


class DeviceLink(ABC):
    """The way to a device and back, in the order in which it works.

    Attributes:
        device: at the other end.
        turn: which of two staging memories may be written, 0 or 1.
        gaps: between steps; None if the device is the host.
        forbids_sync: whether an operation in a step that has the host wait is an error.
    """

    device: torch.device
    turn: int = 0
    gaps: Gaps | None = None
    forbids_sync: bool = False

    @contextmanager
    def allows_sync(self) -> Iterator[None]:
        """To be entered around steps of nobody, which may wait."""
        before, self.forbids_sync = self.forbids_sync, False
        try:
            yield
        finally:
            self.forbids_sync = before

    @abstractmethod
    def step(self) -> AbstractContextManager[None]:
        """To be entered around all that is asked of the device for a step, but for captures.

        It is the next turn from there on, and the staging memory of that turn may be written.
        """

    @abstractmethod
    def forward_begins(self) -> None:
        """To be called within a step, its inputs sent and its forward to be asked for next. Hot."""

    @abstractmethod
    def staging_for(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Host memory that `send` may copy to `target` from, for each turn."""

    @abstractmethod
    def send(self, staging: torch.Tensor, target: torch.Tensor) -> None:
        """Asks for a copy; until this turn comes again, `staging` must not be written. Hot."""

    @abstractmethod
    def upload(self, array: HostArray) -> torch.Tensor:
        """`array` on the device, for this step and those after it; on a CPU it may be the same memory."""

    @abstractmethod
    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Asks for copies of `tensors`, as they are once all work asked for so far is done."""


def open_link(device: torch.device, *, forbids_sync: bool = False) -> DeviceLink:
    """The link to `device`.

    Args:
        device: CPU or CUDA.
        forbids_sync: makes an error of any operation in a step that has the host wait for CUDA.
    """
    return HostLink() if device.type == "cpu" else CudaLink(device, forbids_sync=forbids_sync)


class HostLink(DeviceLink):
    """There is no device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def step(self) -> AbstractContextManager[None]:
        """See `DeviceLink.step`."""
        return nullcontext()

    def forward_begins(self) -> None:
        """Nobody waits for it."""

    def staging_for(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target itself."""
        return target, target

    def send(self, staging: torch.Tensor, target: torch.Tensor) -> None:
        """It is there."""

    def upload(self, array: HostArray) -> torch.Tensor:
        """The same memory, unless it is read-only."""
        return _tensor_of(array)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """See `DeviceLink.fetch`."""
        return _Here([tensor.numpy() for tensor in tensors])


class _Here:
    """What needs not be waited for."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: list[HostArray]) -> None:
        self._arrays = arrays

    def wait(self) -> list[HostArray]:
        return self._arrays


class CudaLink(DeviceLink):
    """Work and copies to the device on the current stream, copies to the host on a stream of their own.

    Args:
        device: the CUDA device.
        forbids_sync: see `open_link`.
    """

    def __init__(self, device: torch.device, *, forbids_sync: bool = False) -> None:
        self.device = device
        self.forbids_sync = forbids_sync
        self._way_back = torch.cuda.Stream(device)
        self.gaps: Gaps = Gaps()
        self._last_fetch: _OnTheWay | None = None
        self._forward: torch.cuda.Event | None = None
        # Of each turn: the events around its last step, and the end of the one before if that was unread.
        self._spans: list[_Span | None] = [None, None]

    @contextmanager
    def step(self) -> Iterator[None]:
        """See `DeviceLink.step`."""
        previous = self._spans[self.turn]
        self.turn ^= 1
        before_last = self._spans[self.turn]
        if before_last is not None:
            before_last.end.synchronize()
            before_last.count_gap(self.gaps)
        is_late = self._last_fetch is None or self._last_fetch.is_read
        self._forward = None
        with _sync_is_an_error() if self.forbids_sync else nullcontext():
            yield
            follows = None if is_late or previous is None else previous.end
            self._spans[self.turn] = _Span(follows, self._forward, _mark())

    def forward_begins(self) -> None:
        """See `DeviceLink.forward_begins`."""
        # Not earlier: a device that waits for the host would be past a mark at the begin of the step at once.
        self._forward = _mark()

    def staging_for(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DeviceLink.staging_for`."""
        return _pinned(target.shape, target.dtype).zero_(), _pinned(target.shape, target.dtype).zero_()

    def send(self, staging: torch.Tensor, target: torch.Tensor) -> None:
        """See `DeviceLink.send`."""
        target.copy_(staging, non_blocking=True)

    def upload(self, array: HostArray) -> torch.Tensor:
        """See `DeviceLink.upload`."""
        source = _tensor_of(array)
        # From torch's cache of pinned memory, which keeps it until the copy has been made.
        staging = _pinned(source.shape, source.dtype).copy_(source)
        return staging.to(self.device, non_blocking=True)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """See `DeviceLink.fetch`."""
        if not tensors:
            return _Here([])
        self._way_back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._way_back):
            copies = [_pinned(one.shape, one.dtype).copy_(one, non_blocking=True) for one in tensors]
            done = _mark()
        self._last_fetch = _OnTheWay(tensors, copies, done)
        return self._last_fetch


@dataclass(frozen=True, slots=True)
class _Span:
    """A step on the device.

    Attributes:
        follows: the end of the step before, if that was unread when this one was launched.
        forward: the begin of this one's forward; None if it had none.
        end: of this one.
    """

    follows: torch.cuda.Event | None
    forward: torch.cuda.Event | None
    end: torch.cuda.Event

    def count_gap(self, gaps: Gaps) -> None:
        """Once it has run."""
        if self.follows is not None and self.forward is not None:
            gaps.count += 1
            gaps.total_ns += int(self.follows.elapsed_time(self.forward) * 1e6)


class _OnTheWay:
    """Keeps what is copied: freed, its memory would be given to work of the other stream."""

    __slots__ = ("_copies", "_done", "_sources", "is_read")

    def __init__(
        self, sources: Sequence[torch.Tensor], copies: list[torch.Tensor], done: torch.cuda.Event
    ) -> None:
        self._sources, self._copies, self._done = sources, copies, done
        self.is_read = False

    def wait(self) -> list[HostArray]:
        self._done.synchronize()
        self._sources = ()
        self.is_read = True
        return [copy.numpy() for copy in self._copies]


def _tensor_of(array: HostArray) -> torch.Tensor:
    """On the same memory, unless that is read-only, which torch does not know."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _mark() -> torch.cuda.Event:
    """An event behind all that the current stream has been asked for; who waits for it sleeps."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


@contextmanager
def _sync_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
