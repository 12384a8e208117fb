"""Writes tiny GGUF models, for tests of what reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 2
TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "a",
    "b",
    "c",
    "ab",
    "abc",
    "Ġ",
    "Ġa",
    "1",
    "2",
    "12",
]
MERGES = ["a b", "ab c", "Ġ a", "1 2"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def dense_weights(architecture: str = "llama", layers: int = LAYERS) -> dict[str, np.ndarray]:
    """Float32 weights of a tiny model under their GGUF names."""
    rng = np.random.default_rng(7)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(layers):
        block = f"blk.{layer}."
        shapes[block + "attn_norm.weight"] = (HIDDEN,)
        shapes[block + "attn_q.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[block + "attn_k.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[block + "attn_v.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[block + "attn_output.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[block + "ffn_norm.weight"] = (HIDDEN,)
        shapes[block + "ffn_gate.weight"] = (FFN, HIDDEN)
        shapes[block + "ffn_up.weight"] = (FFN, HIDDEN)
        shapes[block + "ffn_down.weight"] = (HIDDEN, FFN)
        if architecture == "qwen2":
            shapes[block + "attn_q.bias"] = (HEADS * HEAD_DIM,)
            shapes[block + "attn_k.bias"] = (KV_HEADS * HEAD_DIM,)
            shapes[block + "attn_v.bias"] = (KV_HEADS * HEAD_DIM,)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@dataclass
class GgufRecipe:
    """What goes into a GGUF file; tests change what they are about.

    Attributes:
        keys: further keys, or other values for the usual ones; None leaves a key out.
        weights: float32 tensors by name.
        kinds: storage format by tensor name; float32 for the others.
    """

    architecture: str = "llama"
    keys: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, np.ndarray] | None = None
    kinds: dict[str, GGMLQuantizationType] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        for key, value in (self._usual_keys() | self.keys).items():
            if value is not None:
                _add_key(writer, key, value)
        weights = self.weights if self.weights is not None else dense_weights(self.architecture)
        for name, values in weights.items():
            kind = self.kinds.get(name, GGMLQuantizationType.F32)
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _usual_keys(self) -> dict[str, Any]:
        model = {
            "block_count": LAYERS,
            "context_length": 256,
            "embedding_length": HIDDEN,
            "feed_forward_length": FFN,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 100000.0,
            "rope.dimension_count": HEAD_DIM,
        }
        tokenizer = {
            "ggml.model": "gpt2",
            "ggml.pre": "smollm",
            "ggml.tokens": TOKENS,
            "ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
            "ggml.merges": MERGES,
            "ggml.bos_token_id": 1,
            "ggml.eos_token_id": 2,
            "ggml.unknown_token_id": 0,
            "ggml.padding_token_id": 2,
            "ggml.add_bos_token": False,
            "chat_template": TEMPLATE,
        }
        return {f"{self.architecture}.{key}": value for key, value in model.items()} | {
            f"tokenizer.{key}": value for key, value in tokenizer.items()
        }


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
