"""GGUF keys → config.json and generation_config.json in the words of Hugging Face's Llama family."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.artifacts.gguf_metadata import GgufMetadata

MODEL_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# What every Llama 3.1, 3.2 and 3.3 uses; the file only has the factors that come of it.
_LLAMA3_ORIGINAL_LEN, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


def model_config(
    metadata: GgufMetadata,
    vocab_size: int,
    tensor_names: frozenset[str],
    rope_factors: npt.NDArray[np.float32] | None,
    dtype: str,
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        metadata: keys of the file.
        vocab_size: rows of the embedding.
        tensor_names: all tensors of the file, in its own names.
        rope_factors: float32[head_dim / 2], divisors of the rotary frequencies, if the file has them.
        dtype: number format of the converted weights.

    Raises:
        ConfigError: the model has parts that the architecture here does not.
    """
    if metadata.model("expert_count", 0):
        raise metadata.error("mixture-of-experts models are not supported; use a dense one.")
    hidden_size = int(metadata.model("embedding_length"))
    num_heads = int(metadata.model("attention.head_count"))
    head_dim = int(metadata.model("attention.key_length", hidden_size // num_heads))
    if int(metadata.model("rope.dimension_count", head_dim)) != head_dim:
        raise metadata.error("rotary embedding of a part of the head only is not supported.")
    rope_theta = _shortest(metadata.model("rope.freq_base", 10000.0))
    config = {
        "architectures": [MODEL_CLASSES[metadata.architecture]],
        "model_type": metadata.architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata.model("feed_forward_length")),
        "num_hidden_layers": int(metadata.model("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(metadata.model("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata.model("context_length")),
        "rms_norm_eps": _shortest(metadata.model("attention.layer_norm_rms_epsilon")),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(metadata, rope_factors, rope_theta, head_dim),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": metadata.token_id("eos"),
        "torch_dtype": dtype,
    }
    if metadata.architecture != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
    return config


def generation_config(metadata: GgufMetadata) -> dict[str, Any]:
    """The content of generation_config.json: which tokens end an answer."""
    ends = dict.fromkeys(metadata.token_id(role) for role in ("eos", "eot", "eom"))
    eos_ids = [token for token in ends if token is not None]
    named = {
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": metadata.token_id("padding"),
    }
    return {name: value for name, value in named.items() if value is not None}


def _shortest(value: float) -> float:
    # GGUF holds float32: 1e-5 comes back as 9.999999747378752e-06, which is not what the model's maker wrote.
    return float(str(np.float32(value)))


def _rope_scaling(
    metadata: GgufMetadata, factors: npt.NDArray[np.float32] | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = metadata.model("rope.scaling.type", "none")
    if factors is not None:
        return _llama3_scaling(metadata, factors, theta, head_dim)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest(metadata.model("rope.scaling.factor"))}
    raise metadata.error(f"rotary scaling of type {kind} is not supported.")


def _llama3_scaling(
    metadata: GgufMetadata, factors: npt.NDArray[np.float32], theta: float, head_dim: int
) -> dict[str, Any]:
    """The scaling whose divisors are `factors`: none for short waves, full for long ones, a ramp between."""
    factor = float(factors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_ORIGINAL_LEN / wavelengths
    unscaled = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    expected = 1.0 / ((1.0 - unscaled) / factor + unscaled)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise metadata.error("its table of rotary factors is not that of a Llama 3; it is not supported.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_LEN,
    }
