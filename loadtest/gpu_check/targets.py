"""What the figures should come to. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """A target.

    Attributes:
        name: of the figure.
        limit: the worst value that will do.
        unit: of both, with the blank before it.
        is_least: the figure must be at least `limit`; else at most.
    """

    name: str
    limit: float
    unit: str = ""
    is_least: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` will do; what is no number will not."""
        return value >= self.limit if self.is_least else value <= self.limit

    def words(self, value: float) -> str:
        """The value beside the target."""
        most = "at least" if self.is_least else "at most"
        return f"{value:.4g}{self.unit} (target: {most} {self.limit:g}{self.unit})"


def full_over_floor(batch: int) -> Bound:
    """A decode step from a FULL graph, over the time in which its bytes can be read."""
    return Bound(f"FULL decode step over byte floor, batch {batch}", 1.15)


FULL_BATCHES = (1, 64)
SPEEDUP = Bound("NONE over FULL decode step, batch 1", 2.0, is_least=True)
HOST_GAP = Bound("host gap between steps", 100.0, " µs")
MEMORY_OVERRUN = Bound("memory in use over budget", 1.0)
MEMORY_USED = Bound("memory in use over budget, at least", 0.95, is_least=True)
GRAPH_ESTIMATE = Bound("memory of graphs over its estimate", 1.0)
