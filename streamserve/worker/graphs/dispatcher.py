"""Which graph a step runs from. Pure and torch-free: a table lookup, the same on every device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from streamserve.worker.graphs.descriptor import BatchDescriptor
from streamserve.worker.graphs.mode import CUDAGraphMode, RuntimeMode


class Dispatch(NamedTuple):
    """How a step runs, and the shape that it is padded to; with NONE, its own."""

    mode: RuntimeMode
    padded: BatchDescriptor


class _Route(NamedTuple):
    """Graphs of one kind, smallest first, and the most tokens that each of them takes."""

    sizes: Sequence[int]
    graphs: Sequence[Dispatch]

    def find(self, num_tokens: int) -> Dispatch | None:
        """The smallest graph that takes `num_tokens`."""
        index = bisect_left(self.sizes, num_tokens)
        return self.graphs[index] if index < len(self.graphs) else None


class GraphDispatcher:
    """Finds the graph of a step.

    A uniform step tries the graphs for decodes, then those for mixed steps; any other step tries only the
    latter. Of each kind it takes the smallest that has room. Whatever finds none runs eagerly.

    Attributes:
        mode: as given.

    Args:
        mode: lowered to what the attention backend supports.
        sizes: token counts that graphs are captured for.
        max_num_seqs: most requests of a step.
        query_len: tokens that a decoding request runs in a step.
    """

    def __init__(
        self, mode: CUDAGraphMode, sizes: Iterable[int], max_num_seqs: int, query_len: int = 1
    ) -> None:
        self.mode = mode
        ascending = sorted(sizes)
        self._mixed: list[_Route] = []
        if mode.mixed is RuntimeMode.PIECEWISE:
            self._mixed = [_route(RuntimeMode.PIECEWISE, [_piecewise(size) for size in ascending])]
        elif mode.mixed is RuntimeMode.FULL:
            self._mixed = [_route(RuntimeMode.FULL, [_mixed(size, max_num_seqs) for size in ascending])]
        self._uniform = list(self._mixed)
        # Where one FULL graph takes every step, decodes have no graphs of their own.
        if mode.decode is RuntimeMode.FULL and mode.mixed is not RuntimeMode.FULL:
            full_house = max_num_seqs * query_len
            shapes = [
                BatchDescriptor(size, size // query_len, True)
                for size in ascending
                if size <= full_house and size % query_len == 0
            ]
            self._uniform.insert(0, _route(RuntimeMode.FULL, shapes))

    def dispatch(self, batch: BatchDescriptor) -> Dispatch:
        """How the step `batch` runs. Hot: once a step."""
        for route in self._uniform if batch.uniform else self._mixed:
            found = route.find(batch.num_tokens)
            if found is not None:
                return found
        return Dispatch(RuntimeMode.NONE, batch)

    def captures(self) -> list[Dispatch]:
        """All graphs there may be, in the order of their capture: piecewise before full, largest first.

        The first ones take the most memory, which the others then share.
        """
        graphs = {graph for route in (*self._uniform, *self._mixed) for graph in route.graphs}
        return sorted(graphs, key=lambda graph: (graph.mode, -graph.padded.num_tokens))


def _route(mode: RuntimeMode, shapes: Iterable[BatchDescriptor]) -> _Route:
    graphs = [Dispatch(mode, shape) for shape in shapes]
    return _Route([graph.padded.num_tokens for graph in graphs], graphs)


def _piecewise(size: int) -> BatchDescriptor:
    return BatchDescriptor(size, None, False)


def _mixed(size: int, max_num_seqs: int) -> BatchDescriptor:
    """As many requests as could share `size` tokens."""
    return BatchDescriptor(size, min(size, max_num_seqs), False)
