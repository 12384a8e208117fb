"""Which class runs which architecture."""

from __future__ import annotations

import torch

from streamserve.worker.models.config import DecoderConfig
from streamserve.worker.models.llama import LlamaModel

_MODELS: dict[str, type[LlamaModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
}


def build_model(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """The model of `config.architecture`, its parameters uninitialised."""
    return _MODELS[config.architecture](config, dtype, device)
