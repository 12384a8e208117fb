"""A tiny random model with a working tokenizer, as a Hugging Face folder: what most tests serve.

Two layers, hidden size 64, 512 tokens. Its text is gibberish, but varied: weights are scaled so that greedy
outputs neither repeat one token nor hang on rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
ENDOFTEXT, IM_START, IM_END = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = """The river that runs through the old town was once full of boats, and every morning the market
on its northern bank filled with people who had come from the villages. They brought apples, bread, cheese
and wool; they took home news, cloth and iron. When the railway was built the boats went away one after the
other, but the market stayed. What is a number? A number is what all collections of the same size have in
common. def add(first, second): return first + second. for index in range(10): print(index, "done"). If you
want to learn how something works, take it apart, write down what each piece does, and put it together again
with your eyes closed. Überall grüßen Menschen einander, où que l'on soit, 你好世界, привет мир."""


def make_tiny_model(folder: Path, architecture: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Writes config, float32 weights, tokenizer and generation config into `folder` and returns it.

    Args:
        folder: created if need be.
        architecture: `llama`, `mistral`, `qwen2` or `qwen3`.
        seed: of the weights.
        overrides: fields of the transformers config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    _write_weights(folder, architecture, seed, overrides)
    generation = {"bos_token_id": IM_START, "eos_token_id": [IM_END, ENDOFTEXT]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def _write_weights(folder: Path, architecture: str, seed: int, overrides: dict[str, Any]) -> None:
    import torch
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": False,
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "pad_token_id": ENDOFTEXT,
    }
    if architecture == "mistral":
        settings["sliding_window"] = None
    config_class, model_class = classes[architecture]
    config = config_class(**{**settings, **overrides})
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.7, 1.3)
            elif parameter.dim() == 1:
                parameter.normal_(0.0, 0.3)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 1.0)
            else:
                # Three times what keeps the scale: attention and MLP then outweigh the token just read.
                parameter.normal_(0.0, 3.0 * parameter.shape[1] ** -0.5)
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 65536,
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(i): {"content": token, "special": True, "normalized": False}
            for i, token in enumerate(SPECIAL_TOKENS)
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
