"""A graph: device work that is recorded once and run again without the Python that asked for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager


class GraphError(RuntimeError):
    """A capture or replay that would compute something else than an eager forward: a bug, never an input."""


class Graph(ABC):
    """What ran between `begin` and `end`, to be run again by `replay`.

    It is what it was: the same operations on the same memory, with all host numbers as they were. What it
    allocates comes from a pool that it shares with all other graphs, so that nothing in there outlives the
    replay.
    """

    @abstractmethod
    def begin(self) -> None:
        """Work asked for from now on is recorded; whether it also runs is not said."""

    @abstractmethod
    def end(self) -> None:
        """The work is all there."""

    @abstractmethod
    def replay(self) -> None:
        """Runs the work."""


class GraphDevice(ABC):
    """Where graphs are captured."""

    @abstractmethod
    def new_graph(self) -> Graph:
        """An empty graph, on the pool of all graphs of this device."""

    @abstractmethod
    def capturing(self) -> AbstractContextManager[None]:
        """To be entered around warm-up and capture; nothing else may use the device meanwhile."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory of the device that nobody uses; a graph takes what of it goes while it is captured."""
