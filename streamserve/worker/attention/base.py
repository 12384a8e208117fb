"""What an attention backend is to the runner and the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import torch

from streamserve.worker.batch import InputBatch, StepInputs
from streamserve.worker.graphs.descriptor import BatchDescriptor
from streamserve.worker.graphs.mode import GraphSupport

__all__ = ["Attention", "AttentionBackend", "GraphSupport"]


class Attention(Protocol):
    """What a model calls: a backend, or who stands in for one while a graph is captured."""

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
        """See `AttentionBackend.forward`."""


class AttentionBackend(ABC):
    """Causal attention over the paged KV cache, for prefill and decode rows of one step alike.

    In a PIECEWISE graph attention is not captured: `forward` gets the step as it is, unpadded, from any
    backend. A FULL graph has `forward` captured in it, on what `build_for_capture` returned. It must then
    launch the same work whatever the step is, read all that differs between steps from device memory, and
    write into `out`. Before each replay `build` is called with the shape of the graph and writes the step's
    numbers into the tensors that the graph reads; rows of padding must leave the cache alone. A backend whose
    kernels take `PagedMetadata` derives from `PagedAttentionBackend`, which does all that.
    """

    graph_support: ClassVar[GraphSupport]

    @staticmethod
    @abstractmethod
    def supports_block_size(block_size: int) -> bool:
        """Whether the cache may have blocks of this many tokens."""

    @abstractmethod
    def bind(self, batch: InputBatch) -> None:
        """Makes what it needs for steps of `batch`, which are all it will see; before the first one."""

    @abstractmethod
    def build(self, batch: InputBatch, step: StepInputs, *, padded: BatchDescriptor | None = None) -> Any:
        """What `forward` must know about a step; made once, handed to it by every layer.

        Args:
            batch: the slots.
            step: as `batch.prepare` returned it.
            padded: shape of the FULL graph that the step runs from; None when `forward` itself will run. Only
                what `graph_support` allows is asked for.
        """

    def build_for_capture(self, batch: InputBatch, padded: BatchDescriptor) -> Any:
        """Stands in for `build` while a FULL graph is captured: a step of that shape that writes nothing."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    @abstractmethod
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
        """Puts `k` and `v` into the cache of `layer` and attends.

        Args:
            q: [t, num_heads, head_dim]; may be strided.
            k, v: [t, num_kv_heads, head_dim]; may be strided.
            out: [t, num_heads * head_dim], written.
            layer: index of the layer.
            metadata: from `build`, of this step.
        """
