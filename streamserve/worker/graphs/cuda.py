"""CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from streamserve.worker.graphs.graph import Graph, GraphDevice


class CudaGraph(Graph):
    """Captures the current stream, which must not be the default one; replays on the one current then.

    Args:
        pool: of `torch.cuda.graph_pool_handle`.
    """

    def __init__(self, pool: tuple[int, int]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def begin(self) -> None:
        """See `Graph.begin`."""
        # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache each time, and one
        # forward is many graphs. Other threads may use CUDA meanwhile, hence the error mode.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """See `Graph.end`."""
        self._graph.capture_end()

    def replay(self) -> None:
        """See `Graph.replay`."""
        self._graph.replay()


class CudaGraphs(GraphDevice):
    """Graphs of one CUDA device. They share one pool, which is right as long as no two of them run at once.

    Args:
        device: the CUDA device.
        stream: to capture on, not the default one; None makes one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream or torch.cuda.Stream(device)

    def new_graph(self) -> CudaGraph:
        """See `GraphDevice.new_graph`."""
        return CudaGraph(self._pool)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """On the capture stream: what a library allocates for a stream when it is first used on it, the
        warm-up has made it allocate there. Without garbage collection, which could free a graph meanwhile.
        """
        self.synchronize()
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            if collects:
                gc.enable()
            self.synchronize()

    def synchronize(self) -> None:
        """See `GraphDevice.synchronize`."""
        torch.cuda.synchronize(self._device)

    def free_bytes(self) -> int:
        """See `GraphDevice.free_bytes`."""
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free
