"""What a model is to those who run it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from streamserve.worker.attention.base import Attention
from streamserve.worker.models.config import DecoderConfig
from streamserve.worker.models.llama import ForwardBuffers


class Model(Protocol):
    """Eager or compiled: a `LlamaModel`, or who stands in for one."""

    @property
    def config(self) -> DecoderConfig:
        """The model's."""

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size]."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        metadata: Any,
        buffers: ForwardBuffers | None = None,
    ) -> torch.Tensor:
        """See `LlamaModel.forward`; the result may be overwritten by the next one."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `LlamaModel.logits`."""
