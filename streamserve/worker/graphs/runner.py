"""Runs forwards from captured graphs, and captures them."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from streamserve.worker.attention.base import Attention, AttentionBackend
from streamserve.worker.batch import InputBatch, StepInputs
from streamserve.worker.graphs.descriptor import BatchDescriptor
from streamserve.worker.graphs.dispatcher import Dispatch, GraphDispatcher
from streamserve.worker.graphs.graph import GraphDevice, GraphError
from streamserve.worker.graphs.mode import RuntimeMode
from streamserve.worker.graphs.segments import (
    BreakingAttention,
    BridgeBuffers,
    CapturedForward,
    ForwardRecorder,
)
from streamserve.worker.models.llama import ForwardBuffers
from streamserve.worker.models.model import Model


@dataclass(slots=True)
class GraphCounters:
    """What steps came to, since the start.

    Attributes:
        steps: by how they ran.
        padded_tokens: rows that were run for nothing.
        fallbacks: steps that ran eagerly although their kind has graphs: more tokens than the largest one
            takes, or not captured yet.
    """

    steps: dict[RuntimeMode, int] = field(default_factory=lambda: dict.fromkeys(RuntimeMode, 0))
    padded_tokens: int = 0
    fallbacks: int = 0


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and what it was captured with: tells whether a step still fits."""

    forward: CapturedForward
    fingerprint: dict[str, Any]


class GraphRunner:
    """A model whose forwards run from graphs where there are any.

    Attributes:
        counters: see there.
        bytes_taken: memory of the device that the captured graphs take.

    Args:
        model: parameters loaded.
        batch: lays the steps out.
        attention: bound to the KV cache; supports the dispatcher's mode.
        dispatcher: finds the graph of a step.
        device: captures.
        checks: compare, at each replay, the memory and the host numbers that the graph was captured with to
            those of the step.
    """

    def __init__(
        self,
        model: Model,
        batch: InputBatch,
        attention: AttentionBackend,
        dispatcher: GraphDispatcher,
        device: GraphDevice,
        *,
        checks: bool = False,
    ) -> None:
        self.counters = GraphCounters()
        self.bytes_taken = 0
        self._model, self._batch, self._attention = model, batch, attention
        self._dispatcher = dispatcher
        self._device = device
        self._checks = checks
        self._waiting = deque(dispatcher.captures())
        self._captured: dict[Dispatch, _Captured] = {}
        largest = max((graph.padded.num_tokens for graph in self._waiting), default=0)
        sizes = (model.config, largest, model.embedding.dtype, model.embedding.device)
        self._buffers = ForwardBuffers.allocate(*sizes)
        self._bridge = BridgeBuffers.allocate(*sizes)

    @property
    def num_waiting(self) -> int:
        """Graphs that are still to be captured."""
        return len(self._waiting)

    @property
    def num_captured(self) -> int:
        """Graphs that are there."""
        return len(self._captured)

    @property
    def waiting(self) -> list[Dispatch]:
        """Those that are still to be captured, in the order in which they will be."""
        return list(self._waiting)

    def capture_next(self) -> None:
        """Captures the next graph; see `capture`."""
        self.capture(self._waiting.popleft())

    def capture(self, graph: Dispatch) -> int:
        """Captures one graph, after a warm-up; between steps, since it writes the buffers of both.

        Returns:
            The bytes that it takes.

        Raises:
            GraphError: the forward cannot be captured.
            RuntimeError: the device cannot capture it; torch.OutOfMemoryError among them.
        """
        with torch.inference_mode(), self._device.capturing():
            self._captured[graph], taken = self._capture(graph)
        self.bytes_taken += taken
        return taken

    def give_up(self) -> None:
        """Captures no more graphs."""
        self._waiting.clear()

    def forward(self, step: StepInputs) -> torch.Tensor:
        """[t, hidden_size] of a step's tokens; overwritten by the next one. Hot: once a step."""
        num_tokens = step.num_tokens
        # Nobody speculates, so a request that decodes runs one token.
        uniform = num_tokens == len(step.slots)
        graph, captured = self._find(step, uniform)
        if captured is None:
            self._count_eager(uniform)
            metadata = self._attention.build(self._batch, step)
            self._batch.link.forward_begins()
            return self._model.forward(step.token_ids, step.positions, self._attention, metadata)
        if graph.mode is RuntimeMode.FULL:
            self._replay_full(captured, graph.padded, step)
        else:
            self._replay_piecewise(captured, graph.padded, step)
        self.counters.steps[graph.mode] += 1
        self.counters.padded_tokens += graph.padded.num_tokens - num_tokens
        return self._buffers.hidden[:num_tokens]

    def _find(self, step: StepInputs, uniform: bool) -> tuple[Dispatch, _Captured | None]:
        """The graph of a step; while that of a decode is not captured, the one of a mixed step like it."""
        graph = self._dispatcher.dispatch(BatchDescriptor(step.num_tokens, len(step.slots), uniform))
        captured = self._captured.get(graph)
        if captured is None and uniform:
            graph = self._dispatcher.dispatch(BatchDescriptor(step.num_tokens, len(step.slots), False))
            captured = self._captured.get(graph)
        return graph, captured

    def _replay_full(self, captured: _Captured, padded: BatchDescriptor, step: StepInputs) -> None:
        metadata = self._attention.build(self._batch, step, padded=padded)
        if self._checks:
            _check(captured.fingerprint, self._fingerprint(padded, metadata))
        self._batch.link.forward_begins()
        captured.forward.replay(_no_attention)

    def _replay_piecewise(self, captured: _Captured, padded: BatchDescriptor, step: StepInputs) -> None:
        attention = self._attention
        metadata = attention.build(self._batch, step)
        if self._checks:
            _check(captured.fingerprint, self._fingerprint(padded, None))
        bridge, out = self._bridge.rows(step.num_tokens), self._buffers.attended[: step.num_tokens]

        def attend(layer: int) -> None:
            attention.forward(bridge.q, bridge.k, bridge.v, out, layer=layer, metadata=metadata)

        self._batch.link.forward_begins()
        captured.forward.replay(attend)

    def _capture(self, graph: Dispatch) -> tuple[_Captured, int]:
        padded = graph.padded
        rows = self._batch.rows(padded.num_tokens)
        buffers = self._buffers.rows(padded.num_tokens)
        recorder = ForwardRecorder(self._device.new_graph)
        attention: Attention
        if graph.mode is RuntimeMode.FULL:
            attention, num_breaks = self._attention, 0
            metadata = self._attention.build_for_capture(self._batch, padded)
        else:
            attention = BreakingAttention(self._bridge.rows(padded.num_tokens), recorder)
            metadata, num_breaks = None, self._model.config.num_layers

        def forward() -> None:
            self._model.forward(rows.token_ids, rows.positions, attention, metadata, buffers)

        # Whatever libraries set up at the first call, they cannot while a stream is captured.
        forward()
        self._device.synchronize()
        free = self._device.free_bytes()
        captured = recorder.record(forward, num_breaks)
        taken = max(0, free - self._device.free_bytes())
        return _Captured(captured, self._fingerprint(padded, metadata)), taken

    def _fingerprint(self, padded: BatchDescriptor, metadata: Any) -> dict[str, Any]:
        """All that a graph has baked in of what a step could change, by name."""
        rows = self._batch.rows(padded.num_tokens)
        baked: dict[str, Any] = {"token_ids": rows.token_ids, "positions": rows.positions}
        if dataclasses.is_dataclass(metadata):
            baked |= {item.name: getattr(metadata, item.name) for item in dataclasses.fields(metadata)}
        return {name: _identity(value) for name, value in baked.items()}

    def _count_eager(self, uniform: bool) -> None:
        mode = self._dispatcher.mode
        self.counters.steps[RuntimeMode.NONE] += 1
        if (mode.decode if uniform else mode.mixed) is not RuntimeMode.NONE:
            self.counters.fallbacks += 1


def _no_attention(layer: int) -> None:
    raise GraphError(f"a FULL graph is broken at layer {layer}")


def _identity(value: Any) -> Any:
    """What must stay the same: of a tensor, the memory and how it is laid out; else the value."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
    return value


def _check(captured: dict[str, Any], current: dict[str, Any]) -> None:
    changed = [name for name, value in captured.items() if current.get(name) != value]
    if changed:
        raise GraphError(f"not what the graph was captured with: {', '.join(changed)}")
