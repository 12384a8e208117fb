"""GGUF file → Hugging Face folder, so that everything after it knows one format only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.artifacts.gguf_config import MODEL_CLASSES, generation_config, model_config
from streamserve.artifacts.gguf_metadata import GgufMetadata, one_line
from streamserve.artifacts.gguf_tokenizer import build_tokenizer, tokenizer_config
from streamserve.artifacts.safetensors_file import Float32Array, TensorSource, write_safetensors
from streamserve.errors import ConfigError

# Part of the name of every cache entry: raise it when the same file is to be converted differently.
CONVERTER_VERSION = 1
ARCHITECTURES = tuple(MODEL_CLASSES)

_ROPE_FACTORS = "rope_freqs.weight"
_OUTER_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Values turned to float32 at a time: large enough for NumPy, small enough for the processor's cache.
_PIECE_VALUES = 2**19
# What comes of values that no tool would have written: zeros, numbers for text, lengths beyond all bounds.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, MemoryError)


def convert_gguf(
    source: Path,
    folder: Path,
    dtype: str,
    progress: Callable[[str, float], None],
    sampling: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Fills the empty `folder` with what `source` holds, its weights in `dtype`.

    Memory in use stays at some tens of megabytes beyond the tokenizer, whatever the size of the model.

    Args:
        source: the GGUF file.
        folder: an empty folder.
        dtype: float32, bfloat16 or float16.
        progress: told what is going on and how far it is, from 0 to 1.
        sampling: goes into generation_config.json as it is.

    Raises:
        ConfigError: the file is damaged or holds something that cannot be served.
        OSError: `folder` cannot be written to.
    """
    what = f"converting {source.name} to {dtype}"
    progress(what, 0.0)
    try:
        _convert(source, folder, dtype, lambda done: progress(what, done), sampling)
    except _DAMAGE as error:
        raise ConfigError(f"MODEL {source}: the GGUF file is damaged ({one_line(error)}).") from error


def _convert(
    source: Path,
    folder: Path,
    dtype: str,
    progress: Callable[[float], None],
    sampling: Mapping[str, float],
) -> None:
    reader = _open(source)
    metadata = GgufMetadata(source, {name: field.contents() for name, field in reader.fields.items()})
    split = reader.fields.get("split.count")
    if split is not None and split.contents() > 1:
        raise metadata.error("split GGUF files are not supported; merge the parts into one file.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(_ROPE_FACTORS, None)
    sources = [_source(metadata, tensor) for tensor in tensors.values()]
    config = model_config(
        metadata,
        vocab_size=_vocab_size(metadata, tensors),
        tensor_names=frozenset(tensors),
        rope_factors=None if factors is None else np.concatenate(list(_pieces(metadata, factors, None))),
        dtype=dtype,
    )
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {**generation_config(metadata), **sampling})
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    write_safetensors(folder / "model.safetensors", dtype, sources, progress)


def _open(source: Path) -> Any:
    # Imported here since only a conversion needs it, and most starts find the folder in the cache.
    from gguf import GGUFReader

    try:
        return GGUFReader(source)
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(
            f"MODEL {source}: the GGUF file is damaged or cut short ({one_line(error)})."
        ) from error


def _vocab_size(metadata: GgufMetadata, tensors: dict[str, Any]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise metadata.error("the GGUF file has no token embedding.")
    return int(embedding.data.shape[0])


def _source(metadata: GgufMetadata, tensor: Any) -> TensorSource:
    # GGUF lists dimensions from the innermost out.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    order = None
    if metadata.architecture == "llama":
        order = _row_order(metadata, tensor.name, shape[0])
    return TensorSource(_name(metadata, tensor.name), shape, partial(_pieces, metadata, tensor, order))


def _name(metadata: GgufMetadata, name: str) -> str:
    """The Hugging Face name of a tensor: `blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    module, _, kind = name.rpartition(".")
    if module in _OUTER_MODULES:
        return f"{_OUTER_MODULES[module]}.{kind}"
    prefix, _, part = module.rpartition(".")
    block, _, layer = prefix.partition(".")
    if block == "blk" and layer.isdigit() and part in _LAYER_MODULES:
        return f"model.layers.{layer}.{_LAYER_MODULES[part]}.{kind}"
    raise metadata.error(f"its tensor {name} has no place in a {metadata.architecture} model.")


def _row_order(metadata: GgufMetadata, name: str, num_rows: int) -> npt.NDArray[np.intp] | None:
    """Which row of a tensor comes where, or None for as they are.

    GGUF's Llama rotates neighbours (0, 1), (2, 3) …, Hugging Face's the halves (0, d/2), (1, d/2 + 1) …, so
    the rows of Q and K within a head are in another order. Moving rows keeps quantised blocks whole.
    """
    if ".attn_q." in name:
        num_heads = int(metadata.model("attention.head_count"))
    elif ".attn_k." in name:
        num_heads = int(metadata.model("attention.head_count_kv", metadata.model("attention.head_count")))
    else:
        return None
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _pieces(
    metadata: GgufMetadata, tensor: Any, order: npt.NDArray[np.intp] | None
) -> Iterator[Float32Array]:
    """The values of a tensor, some rows at a time, rows in `order`."""
    data = tensor.data
    if data.ndim == 1:
        values = _dequantize(metadata, data[np.newaxis], tensor.tensor_type)[0]
        yield values if order is None else values[order]
        return
    step = max(1, _PIECE_VALUES * len(data) // int(tensor.n_elements))
    for start in range(0, len(data), step):
        rows = slice(start, start + step)
        yield _dequantize(metadata, data[rows if order is None else order[rows]], tensor.tensor_type)


def _dequantize(metadata: GgufMetadata, data: npt.NDArray[Any], kind: Any) -> Float32Array:
    from gguf.quants import dequantize

    try:
        values: Float32Array = dequantize(data, kind)
    except NotImplementedError as error:
        raise metadata.error(f"weights in the format {kind.name} are not supported; use another.") from error
    return values


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
