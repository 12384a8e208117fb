"""config.json as this worker understands it: read once, checked, frozen. Torch-free."""

from __future__ import annotations

import contextlib
import json
import reprlib
import sys
from collections.abc import Iterator, Mapping
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
# Far beyond any model; products of sizes still fit into 64 bits, and so many layers are built in no time.
_MOST_WIDTH, _MOST_LAYERS = 2**24, 10_000
_INT32_MAX = 2**31 - 1


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
        ConfigError: no such file, not JSON, or something in it that this worker does not support or that no
            model can have; names the file and the field.
    """
    path, generation_path = folder / "config.json", folder / "generation_config.json"
    config = _read_json(path)
    if config is None:
        raise ConfigError(f"{folder}: no config.json; MODEL must be a Hugging Face model folder")
    with _blamed_on(generation_path):
        eos_token_ids = _eos_token_ids(_read_json(generation_path) or {})
    with _blamed_on(path):
        if eos_token_ids is None:
            eos_token_ids = _eos_token_ids(config)
        return _parse(config, eos_token_ids or ())


@contextlib.contextmanager
def _blamed_on(path: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_json(path: Path) -> Json | None:
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return data


def _parse(config: Json, eos_token_ids: tuple[int, ...]) -> DecoderConfig:
    architecture = _architecture(config)
    traits = _TRAITS[architecture]
    _check_supported(config)
    hidden_size = _whole(config, "hidden_size")
    num_heads = _whole(config, "num_attention_heads")
    num_kv_heads = _whole(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_whole(config, "intermediate_size"),
        num_layers=_whole(config, "num_hidden_layers", most=_MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads),
        rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        max_position=_max_position(config, traits["window"]),
        rope=_rope(config),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=_trait(config, traits["qkv_bias"]),
        output_bias=_trait(config, traits["output_bias"]),
        mlp_bias=_flag(config, "mlp_bias"),
        qk_norm=traits["qk_norm"],
        eos_token_ids=eos_token_ids,
    )


def _architecture(config: Json) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"architectures must be a list of names, not {reprlib.repr(names)}")
    for name in names:
        if name in _TRAITS:
            return str(name)
    named = ", ".join(names) or "none named"
    raise ConfigError(f"architecture not supported ({named}); supported are {', '.join(_TRAITS)}")


def _check_supported(config: Json) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation} is not supported, only silu")
    if config.get("quantization_config"):
        raise ConfigError("quantized weights (quantization_config) are not supported")
    rotary_share = _positive(_object(config, "rope_parameters") or config, "partial_rotary_factor", 1.0)
    if rotary_share != 1.0:
        raise ConfigError(f"partial_rotary_factor {rotary_share} is not supported, only 1.0")


def _trait(config: Json, rule: bool | str) -> bool:
    return _flag(config, rule) if isinstance(rule, str) else rule


def _head_dim(config: Json, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ConfigError(
            f"num_attention_heads {num_heads} does not divide hidden_size {hidden_size}; there is no head_dim"
        )
    head_dim = _whole(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd; rotary embedding turns pairs")
    return head_dim


def _max_position(config: Json, window_rule: str | None) -> int:
    """The model's length; where it slides a window, only up to that: so far both attend to the same."""
    max_position = _whole(config, "max_position_embeddings", most=_INT32_MAX)
    if window_rule is None or (window_rule != "sliding_window" and not _flag(config, window_rule)):
        return max_position
    return min(max_position, _whole(config, "sliding_window", max_position, most=_INT32_MAX))


def _rope(config: Json) -> RopeConfig:
    """From `rope_parameters` or, in older files, `rope_theta` and `rope_scaling`."""
    parameters = _object(config, "rope_parameters") or _object(config, "rope_scaling")
    rope_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(f"rope type {rope_type} is not supported; supported are {', '.join(_ROPE_TYPES)}")
    # Below 1, frequencies grow past what float32 holds.
    theta = _positive(config, "rope_theta", 10000.0, least=1.0)
    theta = _positive(parameters, "rope_theta", theta, least=1.0)
    if rope_type == "default":
        return RopeConfig(theta)
    factor = _positive(parameters, "factor", least=1.0)
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, factor)
    low, high = _positive(parameters, "low_freq_factor"), _positive(parameters, "high_freq_factor")
    if high <= low:
        raise ConfigError(f"high_freq_factor {high} must be above low_freq_factor {low}")
    original = _whole(parameters, "original_max_position_embeddings", most=_INT32_MAX)
    return RopeConfig(theta, rope_type, factor, low, high, original)


def _eos_token_ids(config: Json) -> tuple[int, ...] | None:
    value = config.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    return tuple(_as_whole("eos_token_id", i, least=-1, most=_INT32_MAX) for i in ids)


def _whole(config: Json, name: str, default: int | None = None, most: int = _MOST_WIDTH) -> int:
    """A size: a whole number from 1 on. Here and below, null is the same as absent."""
    value = config.get(name)
    if value is not None:
        return _as_whole(name, value, least=1, most=most)
    if default is None:
        raise ConfigError(f"{name} is missing")
    return default


def _as_whole(name: str, value: Any, least: int, most: int) -> int:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_whole or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, not {reprlib.repr(value)}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, not {reprlib.repr(value)}")
    if value > most:
        raise ConfigError(f"{name} must be at most {most}, not {reprlib.repr(value)}")
    return int(value)


def _positive(config: Json, name: str, default: float | None = None, least: float = 0.0) -> float:
    value = config.get(name)
    if value is None:
        if default is None:
            raise ConfigError(f"{name} is missing")
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The largest float bounds whole numbers too; NaN is in no range.
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} must be a positive finite number, not {reprlib.repr(value)}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, not {reprlib.repr(value)}")
    return float(value)


def _flag(config: Json, name: str) -> bool:
    value = config.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {reprlib.repr(value)}")
    return value


def _object(config: Json, name: str) -> Json:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be an object, not {reprlib.repr(value)}")
    return value
