"""Frequencies and rotation equal transformers'."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from streamserve.worker.models.config import RopeConfig
from streamserve.worker.models.rope import RotaryEmbedding, rotate

pytestmark = pytest.mark.torch

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (RopeConfig(1e4), {"rope_type": "default", "rope_theta": 1e4}),
        (RopeConfig(1e6, "linear", 4.0), {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}),
        (RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192), LLAMA3),
    ],
    ids=["default", "linear", "llama3"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(rope: RopeConfig, parameters: dict[str, object], dtype: torch.dtype) -> None:
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters
    )
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(6, 4, 64, generator=generator).to(dtype)
    positions = torch.tensor([0, 1, 17, 4095, 8192, 130_000])
    cos, signed_sin = RotaryEmbedding(rope, 64, dtype, torch.device("cpu")).at(positions)
    ours = rotate(q, cos, signed_sin)
    their_cos, their_sin = LlamaRotaryEmbedding(config)(q, positions[None])
    heads_first = q.transpose(0, 1)[None]
    theirs, _ = apply_rotary_pos_emb(heads_first, heads_first, their_cos, their_sin)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=tolerance, atol=tolerance)
