"""The models that every server here is given, each once as a GGUF file and once as a Hugging Face folder.

Both come of one source with the same weights in bfloat16: the tiny model is made up here, SmolLM2 is the one
that the product ships. Neither needs a download, and nothing here loads torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.artifacts.aliases import ALIASES, DEFAULT_ALIAS
from streamserve.artifacts.resolve import resolve_model
from streamserve.config import ModelConfig, cache_root

DTYPE, _DTYPE_BYTES = "bfloat16", 2
MODELS = ("tiny", "smollm2")

VOCAB_SIZE, LAYERS, HIDDEN, FFN = 512, 2, 64, 128
# The smallest head that all servers have a kernel for.
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 32
TINY_CONTEXT = 65536
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Part of the file's name: raise it when the same name is to hold other content.
_RECIPE = 1

CORPUS = """The river that runs through the old town was once full of boats, and every morning the market
on its northern bank filled with people who had come from the villages. They brought apples, bread, cheese
and wool; they took home news, cloth and iron. When the railway was built the boats went away one after
the other, but the market stayed. If you want to learn how something works, take it apart, write down what
each piece does, and put it together again with your eyes closed. Most of what we call knowledge is the
memory of having been wrong before. A careful builder measures twice, cuts once, and keeps the drawing; a
hasty one measures afterwards."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model in the two forms that servers read.

    Attributes:
        name: tiny or smollm2.
        gguf: file with bfloat16 weights.
        folder: Hugging Face folder with bfloat16 weights.
        kv_token_bytes: what the KV cache takes for a token.
    """

    name: str
    gguf: Path
    folder: Path
    kv_token_bytes: int


def peers_root() -> Path:
    """Where the peers, and the files that only they need, are kept."""
    return cache_root(os.environ) / "peers"


def prepare_model(name: str) -> ServedModel:
    """Makes the model's files, unless they are there.

    Raises:
        ValueError: there is no such model.
        ConfigError: SmolLM2's package is not installed, or the cache cannot be written to.
    """
    models = peers_root() / "models"
    if name == "tiny":
        gguf = _once(models / f"tiny-{_RECIPE}.gguf", _write_tiny)
        source = str(gguf)
    elif name == "smollm2":
        gguf = _once(models / f"SmolLM2-135M-Instruct-{_RECIPE}.bf16.gguf", _write_smollm2)
        source = DEFAULT_ALIAS
    else:
        raise ValueError(f"no model is called {name}; there are {', '.join(MODELS)}")
    folder = resolve_model(ModelConfig(model=source, dtype=DTYPE), lambda what, fraction: None).path
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return ServedModel(name, gguf, folder, values * _DTYPE_BYTES)


def _once(path: Path, write: Any) -> Path:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder) / path.name
            write(partial)
            partial.rename(path)
    return path


def _write_smollm2(path: Path) -> None:
    """The packaged file, whose weights have 4 bits, with bfloat16 ones of the same values."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize

    reader = GGUFReader(ALIASES[DEFAULT_ALIAS].locate())
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        _add_weights(writer, tensor.name, dequantize(tensor.data, tensor.tensor_type))
    _finish(writer)


def _write_tiny(path: Path) -> None:
    from gguf import GGUFWriter

    vocabulary, merges = _tiny_vocabulary()
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(TINY_CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (VOCAB_SIZE - len(SPECIAL_TOKENS)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, values in _tiny_weights(vocabulary):
        _add_weights(writer, name, values)
    _finish(writer)


def _tiny_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens in the order of their ids, and merges, of a byte-level tokenizer trained on the corpus."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].__getitem__)
    assert len(vocabulary) == VOCAB_SIZE, len(vocabulary)
    return vocabulary, [" ".join(merge) for merge in model["merges"]]


def _tiny_weights(vocabulary: list[str]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        # Three times what keeps the scale, so that text is varied.
        return rng.normal(0.0, 3.0 * columns**-0.5, (rows, columns)).astype(np.float32)

    yield "token_embd.weight", rng.normal(0.0, 1.0, (VOCAB_SIZE, HIDDEN)).astype(np.float32)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", np.ones(HIDDEN, np.float32)
        yield block + "attn_q.weight", matrix(HEADS * HEAD_DIM, HIDDEN)
        yield block + "attn_k.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        yield block + "attn_v.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        yield block + "attn_output.weight", matrix(HIDDEN, HEADS * HEAD_DIM)
        yield block + "ffn_norm.weight", np.ones(HIDDEN, np.float32)
        yield block + "ffn_gate.weight", matrix(FFN, HIDDEN)
        yield block + "ffn_up.weight", matrix(FFN, HIDDEN)
        yield block + "ffn_down.weight", matrix(HIDDEN, FFN)
    yield "output_norm.weight", np.ones(HIDDEN, np.float32)
    output = matrix(VOCAB_SIZE, HIDDEN)
    # A token that is half a character would be held back by some servers and not by others, and one that ends
    # the answer would have to be forbidden: with a logit of 0 none of them is ever the likeliest.
    output[[not _is_plain_text(token) for token in vocabulary]] = 0.0
    yield "output.weight", output


def _is_plain_text(token: str) -> bool:
    """Whether a byte-level token is whole ASCII text; a byte-level space is written Ġ."""
    text = token.replace("Ġ", " ")
    return token not in SPECIAL_TOKENS and text.isascii() and text.isprintable()


def _add_weights(writer: Any, name: str, values: npt.NDArray[np.float32]) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    # Norms stay in float32: llama.cpp has no others.
    kind = GGMLQuantizationType.BF16 if values.ndim == 2 else GGMLQuantizationType.F32
    writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
