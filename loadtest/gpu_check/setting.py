"""Where the check runs and how large things are: on a GPU, or in a rehearsal of it on a CPU. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Of Llama 3.1 8B.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
SMALL: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
TINY: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """How large things are.

    Attributes:
        is_rehearsal: on a CPU: graphs are emulated, kernels are interpreted, figures mean nothing.
        folder: for all that is written.
        device: `cuda` or `cpu`.
        small, large: config.json of the model that is checked for being right, and of the one that is timed.
        dtype: of the large one.
        block_size: tokens in a block of the KV cache.
        graph_sizes: of the large model.
        batches: decode steps that are timed.
        context: tokens that requests attend to meanwhile.
        max_model_len: of the large model.
        num_steps: timed for each figure; as many go before them.
        trace_steps: of the mixed trace on the small model.
        sampler_rows, sampler_vocabulary: logits that are sampled from.
        copy_bytes: what is copied to find the device's bandwidth.
        streams, prompt_tokens, max_tokens: what the server is asked for.
    """

    is_rehearsal: bool
    folder: Path
    device: str
    small: dict[str, Any]
    large: dict[str, Any]
    dtype: str
    block_size: int
    graph_sizes: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    max_model_len: int
    num_steps: int
    trace_steps: int
    sampler_rows: int
    sampler_vocabulary: int
    copy_bytes: int
    streams: int
    prompt_tokens: int
    max_tokens: int


def on_gpu(folder: Path) -> Setting:
    """The real thing."""
    return Setting(
        is_rehearsal=False,
        folder=folder,
        device="cuda",
        small=SMALL,
        large=LLAMA_8B,
        dtype="bfloat16",
        block_size=64,
        graph_sizes=(1, 8, 64, 256),
        batches=(1, 8, 64, 256),
        context=512,
        max_model_len=4096,
        num_steps=30,
        trace_steps=300,
        sampler_rows=4096,
        sampler_vocabulary=32_000,
        copy_bytes=2 << 30,
        streams=64,
        prompt_tokens=128,
        max_tokens=256,
    )


def rehearsal(folder: Path) -> Setting:
    """The same on a CPU, as small as it gets."""
    return replace(
        on_gpu(folder),
        is_rehearsal=True,
        device="cpu",
        small=TINY,
        large=TINY,
        block_size=16,
        graph_sizes=(1, 4),
        batches=(1, 4),
        context=40,
        max_model_len=256,
        num_steps=3,
        trace_steps=250,
        sampler_rows=24,
        sampler_vocabulary=300,
        copy_bytes=1 << 20,
        streams=4,
        prompt_tokens=16,
        max_tokens=8,
    )
