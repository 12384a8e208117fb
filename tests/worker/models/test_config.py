"""config.json: what is read, what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamserve.errors import ConfigError
from streamserve.worker.models.config import read_decoder_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    config = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_defaults(tmp_path: Path) -> None:
    config = read_decoder_config(write(tmp_path, num_key_value_heads="absent"))
    assert (config.head_dim, config.num_kv_heads, config.max_position) == (16, 4, 2048)
    assert (config.rope.rope_type, config.rope.theta) == ("default", 10000.0)
    traits = (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm)
    assert traits == (False, False, False, False)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, ("default", 5e5, 1.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ("linear", 1e4, 2.0)),
        ({"rope_theta": 9.0, "rope_scaling": None}, ("default", 9.0, 1.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 3, "rope_theta": 7}}, ("linear", 7.0, 3.0)),
    ],
)
def test_rope_in_old_and_new_spelling(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[str, float, float]
) -> None:
    rope = read_decoder_config(write(tmp_path, **changes)).rope
    assert (rope.rope_type, rope.theta, rope.factor) == expected


@pytest.mark.parametrize(
    ("architecture", "changes", "traits"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("MistralForCausalLM", {}, (False, False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
    ],
)
def test_traits(tmp_path: Path, architecture: str, changes: dict[str, Any], traits: tuple[bool, ...]) -> None:
    config = read_decoder_config(write(tmp_path, architectures=[architecture], **changes))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == traits


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, 2048),
        ("MistralForCausalLM", {"sliding_window": 512}, 512),
        ("MistralForCausalLM", {"sliding_window": 4096}, 2048),
        ("Qwen2ForCausalLM", {"sliding_window": 512, "use_sliding_window": False}, 2048),
        ("Qwen2ForCausalLM", {"sliding_window": 512, "use_sliding_window": True}, 512),
    ],
)
def test_a_sliding_window_bounds_the_length(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: int
) -> None:
    folder = write(tmp_path, architectures=[architecture], **changes)
    assert read_decoder_config(folder).max_position == expected


@pytest.mark.parametrize(
    ("generation", "changes", "expected"),
    [
        (None, {}, (7,)),
        (None, {"eos_token_id": [3, 4]}, (3, 4)),
        (None, {"eos_token_id": None}, ()),
        ({}, {}, (7,)),
        ({"eos_token_id": 9}, {}, (9,)),
        ({"eos_token_id": [9, 8]}, {}, (9, 8)),
    ],
)
def test_eos_ids(
    tmp_path: Path, generation: dict[str, Any] | None, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert read_decoder_config(write(tmp_path, generation, **changes)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": "absent"}, "none named"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantiz"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"vocab_size": "many"}, "many"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_refusals_name_the_cause(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_decoder_config(write(tmp_path, **changes))


def test_refuses_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_decoder_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        read_decoder_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="object"):
        read_decoder_config(tmp_path)
