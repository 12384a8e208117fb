"""config.json: what is read, what is refused and in which words."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        ({"vocab_size": "many"}, "vocab_size must be a whole number, not 'many'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"architectures": "Llama"}, "architectures must be a list of names, not 'Llama'"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list of names"),
        ({"architectures": {"LlamaForCausalLM": 1}}, "architectures must be a list of names"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object, not \[1\]"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
        ({"attention_bias": 2}, "attention_bias must be true or false"),
        ({"mlp_bias": [True]}, "mlp_bias must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a whole number, not '</s>'"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be a whole number, not None"),
        ({"eos_token_id": 2**40}, "eos_token_id must be at most 2147483647"),
        ({"num_attention_heads": 10}, "num_attention_heads 10 does not divide hidden_size 64"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rope_theta": 1e-300}, "rope_theta must be at least 1.0, not 1e-300"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1.0, not 0.5"),
        ({"hidden_size": 60}, "head_dim 15 is odd"),
        ({"hidden_size": "x" * 1000}, r"hidden_size must be a whole number, not 'x{,20}\.\.\.x{,20}'$"),
    ],
)
def test_refusals_name_the_cause(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_decoder_config(write(tmp_path, **changes))
    assert "\n" not in str(caught.value)


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-64, "must be at least 1, not -64"),
        (0, "must be at least 1, not 0"),
        (10**30, "must be at most"),
        (2.5, "must be a whole number, not 2.5"),
        (True, "must be a whole number, not True"),
        ([64], r"must be a whole number, not \[64\]"),
        (float("nan"), "must be a whole number, not nan"),
    ],
)
def test_sizes_are_positive_whole_numbers(tmp_path: Path, name: str, value: Any, words: str) -> None:
    folder = write(tmp_path, architectures=["MistralForCausalLM"], **{name: value})
    with pytest.raises(ConfigError, match=f"config.json: {name} {words}"):
        read_decoder_config(folder)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("value", [0, 0.0, -1e-5, float("nan"), float("inf"), "1e-5", True, [1.0], 10**400])
@pytest.mark.parametrize(
    "name", ["rms_norm_eps", "rope_theta", "rope_theta in rope_parameters", "factor", "low_freq_factor"]
)
def test_factors_are_positive_finite_numbers(tmp_path: Path, name: str, value: Any) -> None:
    field, _, inner = name.partition(" in ")
    if inner or field in LLAMA3.keys() - {"rope_theta"}:
        folder = write(tmp_path, rope_parameters=LLAMA3 | {field: value})
    else:
        folder = write(tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=rf"config.json: {field} must be a positive finite number, not "):
        read_decoder_config(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"high_freq_factor": 1.0}, "high_freq_factor 1.0 must be above low_freq_factor 1.0"),
        ({"high_freq_factor": 0.5}, "high_freq_factor 0.5 must be above low_freq_factor 1.0"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings must be at least 1"),
        ({"factor": None}, "factor is missing"),
    ],
)
def test_llama3_scaling_that_would_give_no_numbers(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_decoder_config(write(tmp_path, rope_scaling=LLAMA3 | changes))


def test_null_is_absent_and_a_whole_float_is_whole(tmp_path: Path) -> None:
    names = ["head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling"]
    names += ["rope_parameters", "tie_word_embeddings", "attention_bias", "sliding_window"]
    nothing: dict[str, Any] = dict.fromkeys(names)
    config = read_decoder_config(write(tmp_path, vocab_size=100.0, **nothing))
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (100, 16, 4)
    assert (config.rms_norm_eps, config.rope.theta) == (1e-6, 10000.0)
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        read_decoder_config(write(tmp_path, hidden_size=None))


def test_a_head_wider_than_its_share_of_the_hidden_size(tmp_path: Path) -> None:
    config = read_decoder_config(write(tmp_path, hidden_size=60, num_attention_heads=8, head_dim=32))
    assert config.head_dim == 32


def test_a_wrong_end_token_is_reported_for_the_file_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/generation_config\.json: eos_token_id must be a whole number"):
        read_decoder_config(write(tmp_path, {"eos_token_id": "</s>"}))


def test_refuses_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_decoder_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        read_decoder_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="object"):
        read_decoder_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="JSON"):
        read_decoder_config(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(LLAMA3)), inner),
    max_leaves=5,
)
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
OBJECTS = ("rope_scaling", "rope_parameters")
FIELDS = (*SIZES, *BASE, *LLAMA3, *FLAGS, *OBJECTS, "hidden_act", "partial_rotary_factor")


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES), st.booleans())
def test_whatever_is_in_it_there_is_a_config_or_a_line(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], has_generation: bool
) -> None:
    folder = write(tmp_path_factory.mktemp("any"), changes if has_generation else None, **changes)
    # Any other error would end the test.
    with contextlib.suppress(ConfigError):
        config = read_decoder_config(folder)
        assert config.num_heads % config.num_kv_heads == 0 < config.num_kv_heads
        assert config.head_dim % 2 == 0 < config.head_dim
        assert config.rms_norm_eps > 0
