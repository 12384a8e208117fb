from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from gguf_recipe import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, TEMPLATE, TOKENS, dense_weights
from safetensors import safe_open

from streamserve.artifacts.gguf_convert import convert_gguf
from streamserve.errors import ConfigError

GgufFile = Callable[..., Path]


def silent(what: str, fraction: float) -> None:
    assert what
    assert 0.0 <= fraction <= 1.0


def converted(source: Path, folder: Path, dtype: str = "float32") -> dict[str, np.ndarray]:
    folder.mkdir()
    convert_gguf(source, folder, dtype, silent)
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in list(file.keys())}


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def halves_from_pairs(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Row 2i + j of a GGUF head is row j·d/2 + i of a Hugging Face head."""
    result = np.empty_like(values)
    for head in range(num_heads):
        for i in range(HEAD_DIM // 2):
            for j in range(2):
                result[head * HEAD_DIM + j * HEAD_DIM // 2 + i] = values[head * HEAD_DIM + 2 * i + j]
    return result


def test_every_tensor_gets_its_name_and_its_values(gguf_file: GgufFile, tmp_path: Path) -> None:
    weights = dense_weights()
    tensors = converted(gguf_file(), tmp_path / "out")
    expected = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        expected |= {
            ours + "input_layernorm.weight": weights[theirs + "attn_norm.weight"],
            ours + "self_attn.q_proj.weight": halves_from_pairs(weights[theirs + "attn_q.weight"], HEADS),
            ours + "self_attn.k_proj.weight": halves_from_pairs(weights[theirs + "attn_k.weight"], KV_HEADS),
            ours + "self_attn.v_proj.weight": weights[theirs + "attn_v.weight"],
            ours + "self_attn.o_proj.weight": weights[theirs + "attn_output.weight"],
            ours + "post_attention_layernorm.weight": weights[theirs + "ffn_norm.weight"],
            ours + "mlp.gate_proj.weight": weights[theirs + "ffn_gate.weight"],
            ours + "mlp.up_proj.weight": weights[theirs + "ffn_up.weight"],
            ours + "mlp.down_proj.weight": weights[theirs + "ffn_down.weight"],
        }
    assert set(tensors) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], values, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0, Kind.Q5_1])
def test_quantised_weights_have_the_values_they_stand_for(
    gguf_file: GgufFile, tmp_path: Path, kind: Kind
) -> None:
    weights = dense_weights()
    stored = ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"]
    tensors = converted(gguf_file(kinds=dict.fromkeys(stored, kind)), tmp_path / "out")
    values = {name: dequantize(quantize(weights[name], kind), kind) for name in stored}
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], values[stored[0]])
    np.testing.assert_array_equal(
        tensors["model.layers.0.self_attn.q_proj.weight"], halves_from_pairs(values[stored[1]], HEADS)
    )
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.down_proj.weight"], values[stored[2]])


def test_a_tensor_of_many_pieces_is_whole(
    gguf_file: GgufFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = gguf_file()
    at_once = converted(source, tmp_path / "at_once")
    monkeypatch.setattr("streamserve.artifacts.gguf_convert._PIECE_VALUES", 3 * HIDDEN)
    in_pieces = converted(source, tmp_path / "in_pieces")
    for name, values in at_once.items():
        np.testing.assert_array_equal(in_pieces[name], values, err_msg=name)


def test_qwen2_keeps_its_row_order_and_has_biases(gguf_file: GgufFile, tmp_path: Path) -> None:
    weights = dense_weights("qwen2")
    source = gguf_file(
        architecture="qwen2", kinds={"blk.0.attn_k.bias": Kind.BF16}, keys={"tokenizer.ggml.pre": "qwen2"}
    )
    tensors = converted(source, tmp_path / "out")
    layer = "model.layers.0.self_attn."
    np.testing.assert_array_equal(tensors[layer + "q_proj.weight"], weights["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(tensors[layer + "q_proj.bias"], weights["blk.0.attn_q.bias"])
    np.testing.assert_allclose(tensors[layer + "k_proj.bias"], weights["blk.0.attn_k.bias"], rtol=2**-8)
    assert config_of(tmp_path / "out")["architectures"] == ["Qwen2ForCausalLM"]


def test_config_says_what_the_file_says(gguf_file: GgufFile, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    converted(gguf_file(), folder)
    config = config_of(folder)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["vocab_size"] == len(TOKENS)
    assert config["hidden_size"] == HIDDEN
    assert config["num_hidden_layers"] == LAYERS
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert config["head_dim"] == HEAD_DIM
    assert config["max_position_embeddings"] == 256
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100000.0
    assert config["rope_scaling"] is None
    assert config["tie_word_embeddings"] is True
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["chat_template"] == TEMPLATE
    assert tokenizer["eos_token"] == "<|im_end|>"
    assert tokenizer["bos_token"] == "<|im_start|>"


def test_an_output_matrix_of_its_own_unties_the_embedding(gguf_file: GgufFile, tmp_path: Path) -> None:
    weights = dense_weights()
    weights["output.weight"] = weights["token_embd.weight"] * 2
    tensors = converted(gguf_file(weights=weights), tmp_path / "out")
    np.testing.assert_array_equal(tensors["lm_head.weight"], weights["output.weight"])
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False


def test_several_tokens_may_end_an_answer(gguf_file: GgufFile, tmp_path: Path) -> None:
    converted(gguf_file(keys={"tokenizer.ggml.eot_token_id": 0}), tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]


def llama3_factors() -> np.ndarray:
    """Divisors for head_dim 16 and theta 1e5 by the rule of Llama 3.1: factor 8, ramp from 2048 to 8192."""
    factors = []
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * 100000.0 ** (2 * i / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_rotary_factors_become_its_scaling(gguf_file: GgufFile, tmp_path: Path) -> None:
    weights = dense_weights() | {"rope_freqs.weight": llama3_factors()}
    tensors = converted(gguf_file(weights=weights), tmp_path / "out")
    assert not any("rope" in name for name in tensors)
    assert config_of(tmp_path / "out")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_linear_scaling_is_kept(gguf_file: GgufFile, tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    converted(gguf_file(keys=keys), tmp_path / "out")
    assert config_of(tmp_path / "out")["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"keys": {"llama.block_count": None}}, "lacks the key llama.block_count"),
        ({"keys": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"keys": {"llama.rope.dimension_count": 8}}, "part of the head"),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"keys": {"split.count": 3}}, "split GGUF"),
        ({"keys": {"tokenizer.ggml.pre": "tekken"}}, "pre-tokenizer 'tekken'"),
        ({"keys": {"tokenizer.ggml.model": "t5"}}, "type t5"),
        ({"weights": dense_weights() | {"blk.0.ffn_gate_exps.weight": np.ones((2, 32))}}, "ffn_gate_exps"),
        ({"weights": {"output_norm.weight": np.ones(32, np.float32)}}, "no token embedding"),
        ({"weights": dense_weights() | {"rope_freqs.weight": np.ones(8) * 3}}, "rotary factors"),
    ],
)
def test_what_cannot_be_served_is_refused(
    gguf_file: GgufFile, tmp_path: Path, fields: dict[str, Any], complaint: str
) -> None:
    source = gguf_file(**fields)
    with pytest.raises(ConfigError, match=complaint) as caught:
        convert_gguf(source, tmp_path, "float32", silent)
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": 5},
        {"llama.attention.head_count_kv": [2, 2]},
        {"llama.embedding_length": "wide"},
        {"llama.rope.freq_base": "ten"},
        {"tokenizer.ggml.tokens": "abc"},
        {"tokenizer.ggml.merges": ["a z"]},
        {"tokenizer.ggml.merges": [1, 2]},
        {"tokenizer.ggml.bos_token_id": "one"},
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5]},
    ],
)
def test_keys_of_the_wrong_kind_are_one_line(
    gguf_file: GgufFile, tmp_path: Path, keys: dict[str, Any]
) -> None:
    source = gguf_file(keys={"llama.attention.key_length": HEAD_DIM} | keys)
    with pytest.raises(ConfigError, match="damaged") as caught:
        convert_gguf(source, tmp_path, "float32", silent)
    assert str(caught.value).startswith(f"MODEL {source}: ")
    assert "\n" not in str(caught.value)


def test_text_in_it_that_is_no_text_is_one_line(gguf_file: GgufFile, tmp_path: Path) -> None:
    source = gguf_file()
    source.write_bytes(source.read_bytes().replace(b"smollm", b"smol\xff\xff"))
    with pytest.raises(ConfigError, match="damaged"):
        convert_gguf(source, tmp_path, "float32", silent)


def test_a_full_disk_is_no_fault_of_the_file(gguf_file: GgufFile, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        convert_gguf(gguf_file(), tmp_path, "float32", silent)


def test_a_cut_file_is_refused(gguf_file: GgufFile, tmp_path: Path) -> None:
    source = gguf_file()
    content = source.read_bytes()
    for length in (200, len(content) // 2, len(content) - 64):
        source.write_bytes(content[:length])
        with pytest.raises(ConfigError, match="damaged or cut short"):
            convert_gguf(source, tmp_path, "float32", silent)
