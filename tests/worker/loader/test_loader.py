"""Weights reach their places, or the error names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamserve.errors import ConfigError
from streamserve.worker.loader import dummy, load_weights
from streamserve.worker.models.config import read_decoder_config
from streamserve.worker.models.llama import LlamaModel

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"


def empty_model(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    return LlamaModel(read_decoder_config(folder), dtype, CPU)


def load(folder: Path, model: LlamaModel, load_format: str = "auto", seed: int = 0) -> list[float]:
    shares: list[float] = []
    load_weights(load_format, folder, seed, model.destinations(), shares.append)
    return shares


@pytest.fixture
def edited(tiny_model: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], None]], Path]:
    """Makes a copy of the tiny model whose tensors were changed by a function."""

    def make(change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        tensors = load_file(tiny_model / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
        return tmp_path

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_where_the_checkpoint_says(tiny_model: Path, dtype: torch.dtype) -> None:
    model = empty_model(tiny_model, dtype)
    shares = load(tiny_model, model)
    tensors = load_file(tiny_model / "model.safetensors")
    destinations = model.destinations()
    assert destinations.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(destinations[name], tensor.to(dtype)), name
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_shards(tiny_model: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = empty_model(tiny_model)
    load(tmp_path, model)
    assert all(torch.equal(model.destinations()[name], tensors[name]) for name in names)

    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors: no such file"):
        load(tmp_path, model)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="not an index"):
        load(tmp_path, model)


def test_missing_tensor(edited: Callable[..., Path]) -> None:
    folder = edited(lambda tensors: tensors.pop(DOWN))
    with pytest.raises(ConfigError, match=DOWN):
        load(folder, empty_model(folder))


def test_wrong_shape(edited: Callable[..., Path]) -> None:
    folder = edited(lambda tensors: tensors.update({DOWN: torch.zeros(64, 100)}))
    with pytest.raises(ConfigError, match=rf"{DOWN} has shape \(64, 100\).*\(64, 128\)"):
        load(folder, empty_model(folder))


EMBEDDING = "model.embed_tokens.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (EMBEDDING, (500, 64), "check vocab_size"),
        ("lm_head.weight", (512, 60), "check hidden_size"),
        (EMBEDDING, (500, 60), "check vocab_size and hidden_size"),
        (KEY, (16, 64), "check num_key_value_heads and head_dim"),
        ("model.layers.0.self_attn.o_proj.weight", (64, 32), "check num_attention_heads and head_dim"),
        (DOWN, (64, 100), "check intermediate_size"),
        ("model.norm.weight", (60,), "check hidden_size"),
        (EMBEDDING, (512, 64, 1), "check vocab_size and hidden_size"),
    ],
)
def test_a_wrong_shape_names_the_field_of_config_json(
    edited: Callable[..., Path], name: str, shape: tuple[int, ...], words: str
) -> None:
    folder = edited(lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(ConfigError, match=f"{name} has shape .*; {words}$"):
        load(folder, empty_model(folder))


def test_weights_of_another_number_of_layers(edited: Callable[..., Path]) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    folder = edited(lambda tensors: tensors.update({name: torch.zeros(64, 128)}))
    with pytest.raises(ConfigError, match=f"{name} has no place.*; check num_hidden_layers$"):
        load(folder, empty_model(folder))


@pytest.mark.parametrize("weight_map", ['{"a": 5}', '{"a": null}', '{"a": [1]}', "[]", "{", "[" * 100_000])
def test_an_index_that_names_no_files(tiny_model: Path, tmp_path: Path, weight_map: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    with pytest.raises(ConfigError, match="not an index"):
        load(tmp_path, empty_model(tiny_model))


def test_unknown_tensor(edited: Callable[..., Path]) -> None:
    folder = edited(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(ConfigError, match=r"q_proj\.bias has no place"):
        load(folder, empty_model(folder))


def test_derived_tensors_are_passed_over(edited: Callable[..., Path]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = edited(lambda tensors: tensors.update({name: torch.zeros(8)}))
    load(folder, empty_model(folder))


def test_broken_file(tiny_model: Path, tmp_path: Path) -> None:
    whole = (tiny_model / "model.safetensors").read_bytes()
    model = empty_model(tiny_model)
    for content in (b"", b"junk that is no header", whole[:-100]):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match="not a whole safetensors file"):
            load(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="must be in safetensors format"):
        load(tmp_path, model)


def test_dummy_weights_depend_on_the_seed_alone(tiny_model: Path, tmp_path: Path) -> None:
    first, again, other = (empty_model(tiny_model) for _ in range(3))
    shares = load(tmp_path, first, "dummy", seed=5)
    load(tmp_path, again, "dummy", seed=5)
    load(tmp_path, other, "dummy", seed=6)
    for name, tensor in first.destinations().items():
        assert tensor.isfinite().all()
        assert torch.equal(tensor, again.destinations()[name]), name
        if tensor.dim() == 2:
            assert not torch.equal(tensor, other.destinations()[name]), name
    assert shares[-1] == 1.0


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, 2**64, -1, -(2**63), -(2**63) - 1, 10**30])
def test_any_whole_number_is_a_seed_of_dummy_weights(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    first, again = empty_model(tiny_model), empty_model(tiny_model)
    load(tmp_path, first, "dummy", seed=seed)
    load(tmp_path, again, "dummy", seed=seed % 2**64)
    assert torch.equal(first.embedding, again.embedding)


def test_large_dummy_matrices_are_like_small_ones(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their numbers come over and over, but never as the same row."""
    monkeypatch.setattr(dummy, "POOL_SIZE", 4099)
    first, again = empty_model(tiny_model), empty_model(tiny_model)
    load(tmp_path, first, "dummy", seed=5)
    load(tmp_path, again, "dummy", seed=5)
    assert first.embedding.numel() > 4099
    for name, tensor in first.destinations().items():
        assert torch.equal(tensor, again.destinations()[name]), name
        if tensor.dim() == 2:
            std = 0.02 if "embed" in name else tensor.shape[1] ** -0.5
            assert tensor.std().item() == pytest.approx(std, rel=0.1), name
            assert len(tensor.unique(dim=0)) == len(tensor), name
    layer = first.destinations()["model.layers.0.mlp.gate_proj.weight"]
    assert not torch.equal(layer, first.destinations()["model.layers.1.mlp.gate_proj.weight"])


def test_loading_makes_no_second_copy(tiny_model: Path) -> None:
    """Merged matrices are filled through views: nothing is concatenated afterwards."""
    model = empty_model(tiny_model)
    layer = model.layers[0]
    before = (layer.qkv.weight.data_ptr(), layer.gate_up.weight.data_ptr())
    load(tiny_model, model)
    assert (layer.qkv.weight.data_ptr(), layer.gate_up.weight.data_ptr()) == before
    q = model.destinations()["model.layers.0.self_attn.q_proj.weight"]
    assert q.data_ptr() == layer.qkv.weight.data_ptr()
