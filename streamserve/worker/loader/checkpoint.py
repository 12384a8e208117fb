"""Reads safetensors, one file or many, straight into place.

Files are mapped, not read: each tensor is converted to the target's number format while it is copied into
its parameter, and no second copy of the weights ever exists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from streamserve.errors import ConfigError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Left over in checkpoints of some exporters: tables that follow from config.json.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")

# For each module, the fields of config.json that its rows and columns follow from; norms have hidden_size.
_HEADS, _KV_HEADS = ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim")
_VOCABULARY, _HIDDEN, _INNER = ("vocab_size",), ("hidden_size",), ("intermediate_size",)
_FIELDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "embed_tokens": (_VOCABULARY, _HIDDEN),
    "lm_head": (_VOCABULARY, _HIDDEN),
    "q_proj": (_HEADS, _HIDDEN),
    "k_proj": (_KV_HEADS, _HIDDEN),
    "v_proj": (_KV_HEADS, _HIDDEN),
    "o_proj": (_HIDDEN, _HEADS),
    "q_norm": (("head_dim",),),
    "k_norm": (("head_dim",),),
    "gate_proj": (_INNER, _HIDDEN),
    "up_proj": (_INNER, _HIDDEN),
    "down_proj": (_HIDDEN, _INNER),
}


def load_checkpoint(
    folder: Path, destinations: Mapping[str, torch.Tensor], progress: Callable[[float], None]
) -> None:
    """Fills `destinations` from the safetensors in `folder`.

    Raises:
        ConfigError: a file or tensor is missing, broken, of the wrong shape, or unknown to the model.
    """
    total = sum(target.nbytes for target in destinations.values())
    loaded: set[str] = set()
    loaded_bytes = 0
    for path in _files(folder):
        for name, tensor in _tensors(path):
            target = destinations.get(name)
            if target is None:
                _check_ignorable(path, name, destinations)
                continue
            if tensor.shape != target.shape:
                raise ConfigError(
                    f"{path}: {name} has shape {tuple(tensor.shape)}, config.json asks for "
                    f"{tuple(target.shape)}; check {_suspects(name, tensor.shape, target.shape)}"
                )
            target.copy_(tensor)
            loaded.add(name)
            loaded_bytes += target.nbytes
            progress(loaded_bytes / total)
    missing = [name for name in destinations if name not in loaded]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{folder}: the weights lack {missing[0]}{more}")


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            return [folder / name for name in sorted(names)]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{index}: not an index of safetensors files") from error
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise ConfigError(f"{folder}: neither {_SINGLE} nor {_INDEX}; weights must be in safetensors format")


def _tensors(path: Path) -> Iterable[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                yield name, file.get_tensor(name)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file, but the index names it") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a whole safetensors file ({error})") from error


def _suspects(name: str, shape: Sequence[int], expected: Sequence[int]) -> str:
    """Which fields of config.json may be behind a wrong shape."""
    fields = _FIELDS.get(name.split(".")[-2], (_HIDDEN,))
    if len(shape) == len(expected):
        axes = zip(fields, shape, expected, strict=False)
        fields = tuple(field for field, size, right in axes if size != right)
    return " and ".join(dict.fromkeys(name for field in fields for name in field))


def _check_ignorable(path: Path, name: str, destinations: Mapping[str, torch.Tensor]) -> None:
    """A tensor without a place is an error: leaving it out would give wrong text without a word."""
    # With tied embeddings some exporters write the output projection again.
    if name == "lm_head.weight" or name.endswith(_DERIVED_SUFFIXES):
        return
    is_layer_too_many = re.sub(r"\.layers\.\d+\.", ".layers.0.", name) in destinations
    hint = "; check num_hidden_layers" if is_layer_too_many else ""
    raise ConfigError(f"{path}: {name} has no place in the architecture that config.json names{hint}")
