"""config.json as this worker understands it: read once, checked, frozen. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamserve.errors import ConfigError

Json = Mapping[str, Any]

# For each architecture: bias on Q, K, V; bias on the attention output; RMSNorm on Q and K; sliding window.
# A string names the key of config.json that decides.
_LLAMA = {"qkv_bias": "attention_bias", "output_bias": "attention_bias", "qk_norm": False, "window": None}
_TRAITS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": {**_LLAMA, "qkv_bias": False, "output_bias": False, "window": "sliding_window"},
    "Qwen2ForCausalLM": {**_LLAMA, "qkv_bias": True, "output_bias": False, "window": "use_sliding_window"},
    "Qwen3ForCausalLM": {**_LLAMA, "qk_norm": True, "window": "use_sliding_window"},
}
_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        rope_type: `default`, `linear` or `llama3`.
        factor: by how much positions are stretched (linear, llama3).
        low_freq_factor, high_freq_factor, original_max_position: where llama3 scaling sets in.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer.

    Attributes:
        architecture: name of the class in config.json.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: K and V heads; divides `num_heads`.
        head_dim: width of a head.
        rms_norm_eps: added under the root of every RMSNorm.
        max_position: most tokens of a request that the weights (and full attention) are good for.
        rope: rotary position embedding.
        tie_word_embeddings: the output projection is the embedding.
        qkv_bias, output_bias, mlp_bias: which projections have a bias.
        qk_norm: RMSNorm on each head of Q and K.
        eos_token_ids: end-of-sequence ids.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Reads config.json and generation_config.json of a model folder.

    Raises:
        ConfigError: no such file, not JSON, or something in it that this worker does not support.
    """
    path = folder / "config.json"
    config = _read_json(path)
    if config is None:
        raise ConfigError(f"{folder}: no config.json; MODEL must be a Hugging Face model folder")
    generation = _read_json(folder / "generation_config.json") or {}
    try:
        return _parse(config, _eos_token_ids(generation, config))
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_json(path: Path) -> Json | None:
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return data


def _parse(config: Json, eos_token_ids: tuple[int, ...]) -> DecoderConfig:
    architecture = _architecture(config)
    traits = _TRAITS[architecture]
    _check_supported(config)
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    return DecoderConfig(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position=_max_position(config, traits["window"]),
        rope=_rope(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=_trait(config, traits["qkv_bias"]),
        output_bias=_trait(config, traits["output_bias"]),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=traits["qk_norm"],
        eos_token_ids=eos_token_ids,
    )


def _architecture(config: Json) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in _TRAITS:
            return str(name)
    named = ", ".join(map(str, names)) or "none named"
    raise ConfigError(f"architecture not supported ({named}); supported are {', '.join(_TRAITS)}")


def _check_supported(config: Json) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation} is not supported, only silu")
    if config.get("quantization_config"):
        raise ConfigError("quantized weights (quantization_config) are not supported")
    rotary_share = (config.get("rope_parameters") or config).get("partial_rotary_factor", 1.0)
    if rotary_share != 1.0:
        raise ConfigError(f"partial_rotary_factor {rotary_share} is not supported, only 1.0")


def _trait(config: Json, rule: bool | str) -> bool:
    return bool(config.get(rule, False)) if isinstance(rule, str) else rule


def _max_position(config: Json, window_rule: str | None) -> int:
    """The model's length; where it slides a window, only up to that: so far both attend to the same."""
    max_position = int(config["max_position_embeddings"])
    if window_rule is None or not config.get(window_rule):
        return max_position
    window = config.get("sliding_window")
    return min(max_position, int(window)) if window else max_position


def _rope(config: Json) -> RopeConfig:
    """From `rope_parameters` or, in older files, `rope_theta` and `rope_scaling`."""
    parameters: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(f"rope type {rope_type} is not supported; supported are {', '.join(_ROPE_TYPES)}")
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if rope_type == "default":
        return RopeConfig(theta)
    factor = float(parameters["factor"])
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, factor)
    return RopeConfig(
        theta,
        rope_type,
        factor,
        float(parameters["low_freq_factor"]),
        float(parameters["high_freq_factor"]),
        int(parameters["original_max_position_embeddings"]),
    )


def _eos_token_ids(generation: Json, config: Json) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)
