"""A captured forward: a list of graphs, with attention between them or inside.

FULL is one graph. PIECEWISE ends the graph where attention is called and begins the next one behind it, in
the same pool; in a replay, attention runs there on the step as it is. What is written before such a break and
read behind it must not be in the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from streamserve.worker.graphs.graph import Graph, GraphError
from streamserve.worker.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class CapturedForward:
    """A forward that can be run again.

    Attributes:
        graphs: in their order; a layer's attention stands between each two.
    """

    graphs: Sequence[Graph]

    def replay(self, attend: Callable[[int], None]) -> None:
        """Runs it. Hot: once a step.

        Args:
            attend: called with the index of the layer at each break.
        """
        self.graphs[0].replay()
        for layer in range(len(self.graphs) - 1):
            attend(layer)
            self.graphs[layer + 1].replay()


class ForwardRecorder:
    """Captures a forward.

    Args:
        new_graph: makes an empty graph.
    """

    def __init__(self, new_graph: Callable[[], Graph]) -> None:
        self._new_graph = new_graph
        self._graphs: list[Graph] = []
        # What is being captured right now.
        self._open: Graph | None = None

    def record(self, forward: Callable[[], None], num_breaks: int) -> CapturedForward:
        """Captures what `forward` does; it calls `break_at` where its graph is to be broken.

        Raises:
            GraphError: it did not break as often as `num_breaks`.
        """
        self._begin()
        try:
            forward()
        except BaseException:
            # The graph is lost, but the device must not go on capturing.
            with suppress(RuntimeError):
                self._end()
            raise
        self._end()
        graphs, self._graphs = self._graphs, []
        if len(graphs) != num_breaks + 1:
            raise GraphError(f"{len(graphs) - 1} breaks in a captured forward that should have {num_breaks}")
        return CapturedForward(graphs)

    def break_at(self, layer: int) -> None:
        """Ends a graph and begins the next one; nothing while no capture is going on.

        Raises:
            GraphError: the layers before have not all had their break.
        """
        if self._open is None:
            return
        if layer != len(self._graphs):
            raise GraphError(f"break {len(self._graphs)} of a captured forward is at layer {layer}")
        self._end()
        self._begin()

    def _begin(self) -> None:
        graph = self._new_graph()
        graph.begin()
        self._open = graph

    def _end(self) -> None:
        """Ends what is open, if anything is."""
        graph, self._open = self._open, None
        if graph is not None:
            graph.end()
            self._graphs.append(graph)


@dataclass(frozen=True, slots=True)
class BridgeBuffers:
    """What attention is called with, carried across a break; all layers use it in turn.

    Attributes:
        q: [t, num_heads, head_dim].
        k, v: [t, num_kv_heads, head_dim].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def allocate(
        cls, config: DecoderConfig, count: int, dtype: torch.dtype, device: torch.device
    ) -> BridgeBuffers:
        """For forwards of up to `count` tokens."""
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        return cls(*(torch.zeros((count, n, config.head_dim), dtype=dtype, device=device) for n in heads))

    def rows(self, count: int) -> BridgeBuffers:
        """The same memory for a forward of `count` tokens."""
        return BridgeBuffers(self.q[:count], self.k[:count], self.v[:count])


class BreakingAttention:
    """Stands in for attention while a PIECEWISE graph is captured.

    Args:
        bridge: of as many rows as the forward has.
        recorder: captures the forward.
    """

    def __init__(self, bridge: BridgeBuffers, recorder: ForwardRecorder) -> None:
        self._bridge = bridge
        self._recorder = recorder

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        layer: int,
        metadata: Any,
    ) -> None:
        """Takes q, k and v over and breaks; `out` is written in the replay."""
        self._bridge.q.copy_(q)
        self._bridge.k.copy_(k)
        self._bridge.v.copy_(v)
        self._recorder.break_at(layer)
