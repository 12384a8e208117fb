"""How much of a device's memory is left for the KV cache: measured before the cache is made.

The share of the device that this server may use (--gpu-memory-utilization), less

    weights      of the model
    buffers      what steps, attention and graphs keep for good
    activations  what the largest step needs on top of that while it runs
    graphs       what captured graphs take, reckoned from the first ones of each kind
    other        what is not tensors: kernels, libraries and their workspaces

is the cache. Pure arithmetic over `DeviceMemory`; who runs the steps is `sizing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from streamserve.errors import ConfigError
from streamserve.worker.spec import MemoryAccount

_GIB = 1 << 30
# A graph takes memory in pieces too small to be seen at the device; what is not seen counts as this.
LEAST_GRAPH_BYTES = 1 << 20


class DeviceMemory(Protocol):
    """The memory of a device, and this process's part of it; all in bytes.

    Attributes:
        total: of the device.
    """

    total: int

    def free(self) -> int:
        """What nobody uses, of the whole device."""

    def allocated(self) -> int:
        """In tensors of this process."""

    def reserved(self) -> int:
        """Held by the allocator of tensors, those in use included."""

    def reset_peak(self) -> None:
        """Begins to watch for `peak`."""

    def peak(self) -> int:
        """The most that was `allocated` at a time since `reset_peak`."""

    def release(self) -> None:
        """Waits for the device and has the allocator give back what no tensor uses."""


@dataclass(frozen=True, slots=True)
class GraphsOfAKind:
    """Graphs that are captured in a row, the largest first.

    Attributes:
        count: how many there will be.
        taken: bytes that the first ones took, those that were tried; at least one.
    """

    count: int
    taken: Sequence[int]

    def estimate(self) -> int:
        """Bytes of all: those to come take no more than the last one tried, since they are smaller."""
        rest = self.count - len(self.taken)
        return sum(self.taken) + rest * max(self.taken[-1], LEAST_GRAPH_BYTES)


class MemoryProfile:
    """Measures what a worker takes while it starts, in the order of its methods.

    Args:
        memory: of the device, before the worker has put anything there.
        utilization: share of the device that this server may use, above 0 and up to 1.

    Raises:
        ConfigError: others hold so much of the device that the share is not to be had.
    """

    def __init__(self, memory: DeviceMemory, utilization: float) -> None:
        self._memory = memory
        self._utilization = utilization
        self._budget = int(memory.total * utilization)
        memory.release()
        self._free, self._allocated, self._reserved = memory.free(), memory.allocated(), memory.reserved()
        # Two digits of it, as it would be given.
        self._most = int(100 * self._free / memory.total) / 100
        if self._free < self._budget:
            lower = f" or go down to {self._most:g}" if self._most > 0 else ""
            raise ConfigError(
                f"--gpu-memory-utilization {utilization:g}: that is {_gib(self._budget)} of the GPU's "
                f"{_gib(memory.total)}, but only {_gib(self._free)} are free; "
                f"{_gib(self._budget - self._free)} are missing (the driver and CUDA hold some of it "
                f"themselves), so stop what else uses it{lower}"
            )
        self._weights = self._buffers = self._activations = self._other = self._graphs = 0

    def weights_loaded(self) -> None:
        """The weights are there, and nothing else yet."""
        self._memory.release()
        self._weights = self._memory.allocated() - self._allocated

    def run_largest(self, run: Callable[[], None], cache_bytes: int) -> None:
        """Measures a step.

        Args:
            run: runs the largest step there can be; all that steps keep for good is there after it.
            cache_bytes: of the makeshift KV cache that it runs on.
        """
        memory = self._memory
        memory.release()
        memory.reset_peak()
        run()
        peak = memory.peak()
        memory.release()
        kept = memory.allocated()
        self._buffers = kept - self._allocated - self._weights - cache_bytes
        self._activations = max(0, peak - kept)
        used = self._free - memory.free()
        self._other = max(0, used - (memory.reserved() - self._reserved))

    def capture(self, capture: Callable[[], Sequence[GraphsOfAKind]]) -> None:
        """Measures graphs.

        Args:
            capture: captures some of each kind.
        """
        memory = self._memory
        before = memory.allocated()
        kinds = capture()
        memory.release()
        # Workspaces of libraries for the stream on which graphs are captured.
        workspaces = max(0, memory.allocated() - before)
        self._graphs = workspaces + sum(kind.estimate() for kind in kinds)

    def account(self, least_cache: int) -> MemoryAccount:
        """Where the memory goes.

        Args:
            least_cache: bytes of the smallest KV cache that anything runs with.

        Raises:
            ConfigError: not even that is left.
        """
        self._memory.release()
        taken = self._weights + self._buffers + self._activations + self._graphs + self._other
        account = MemoryAccount(
            total=self._memory.total,
            budget=self._budget,
            weights=self._weights,
            buffers=self._buffers,
            activations=self._activations,
            graphs=self._graphs,
            other=self._other,
            cache=max(0, self._budget - taken),
        )
        if account.cache < least_cache:
            raise ConfigError(
                f"--gpu-memory-utilization {self._utilization:g}: no room for a KV cache, "
                f"{_gib(least_cache + taken - self._budget)} are missing ({describe(account)}); "
                f"{self._remedy()}"
            )
        return account

    def _remedy(self) -> str:
        """What would make most room."""
        more = "raise it" if self._utilization < self._most else "stop what else uses the GPU"
        steps = self._buffers + self._activations
        largest = max(self._weights, steps, self._graphs)
        if largest == self._weights:
            return f"{more}, or take a smaller model"
        if largest == steps:
            return f"{more}, or lower --max-num-batched-tokens or --max-num-seqs"
        return f"{more}, or capture fewer graphs with --cudagraph-capture-sizes, or none with --enforce-eager"


def describe(account: MemoryAccount) -> str:
    """The whole account in one line."""
    parts = ("weights", "buffers", "activations", "graphs", "other", "cache")
    listed = ", ".join(f"{part} {_gib(getattr(account, part))}" for part in parts)
    return f"of {_gib(account.budget)}: {listed}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
