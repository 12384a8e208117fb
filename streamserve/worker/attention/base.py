"""What an attention backend is to the runner and the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import Any, ClassVar

import torch

from streamserve.worker.batch import InputBatch, StepInputs


class GraphSupport(IntEnum):
    """Which steps a backend can run inside a captured graph; each level includes those below it."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class AttentionBackend(ABC):
    """Causal attention over the paged KV cache, for prefill and decode rows of one step alike."""

    graph_support: ClassVar[GraphSupport]

    @staticmethod
    @abstractmethod
    def supports_block_size(block_size: int) -> bool:
        """Whether the cache may have blocks of this many tokens."""

    @abstractmethod
    def build(self, batch: InputBatch, step: StepInputs) -> Any:
        """What `forward` must know about a step; made once, handed to it by every layer."""

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
