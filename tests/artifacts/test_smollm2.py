"""The real default model against what transformers makes of the same file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from streamserve.artifacts import resolve_model
from streamserve.artifacts.aliases import ALIASES, DEFAULT_ALIAS
from streamserve.config import ModelConfig

pytestmark = [pytest.mark.torch, pytest.mark.smollm2]


@pytest.fixture(scope="module")
def source() -> Path:
    return ALIASES[DEFAULT_ALIAS].locate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    environ = {"STREAMSERVE_CACHE": str(tmp_path_factory.mktemp("cache"))}
    resolved = resolve_model(ModelConfig(dtype="float32"), lambda what, done: None, environ)
    assert resolved.name == "SmolLM2-135M-Instruct"
    return resolved.path


def reference_tokenizer(source: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)


def texts() -> list[str]:
    """Some two hundred strings: prose, numbers, code, other scripts, emoji, whitespace, control tokens."""
    seeds = [
        "The quick brown fox jumps over the lazy dog.",
        "I'm sure they'll say it's what we'd've done; DON'T!",
        "Call 555-0123 or 1234567890, by 2024-02-29T23:59:59Z, for $1,234.56 (≈ €1.100,00).",
        "π ≈ 3.14159265358979, ½ + ¼ = ¾, x² + y³ ≤ 10⁻⁶, ٣ + ४ = 7",
        "日本語のテキストと漢字、ひらがな。中文文本。한국어 텍스트.",
        "Привет, мир! שלום עולם مرحبا بالعالم สวัสดีชาวโลก नमस्ते दुनिया",
        "😊👩‍👩‍👧‍👦🏳️‍🌈👍🏽 ok 🇩🇪🇯🇵",
        "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nprint(f(3))\n",
        '<div class="a b">\n\t<p>Hello&nbsp;there</p>\n</div>',
        '{"key": [1, 2.5e-10, null, true], "nested": {"a": "b\\n"}}',
        "SELECT * FROM t WHERE a<>'b' AND c >= 10; -- comment",
        "https://example.com/path?query=1&other=two#fragment user@example.com",
        "naïve café e\u0301 ﬁne Ⅷ ①②③ Straße İstanbul ﷽",
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
        "<|endoftext|><repo_name>a/b<file_sep>x.py\n<jupyter_code>1+1",
        "almost <|im_start and |im_end|> but <|not_a_token|>",
        "CamelCaseIdentifier snake_case_name SCREAMING_CASE kebab-case x1y2z3",
        "\u200b\u00a0\u3000\ufeff\u2028\x00\x01\x7f",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!????....----====",
        "\U00013000\U0001f9ff\ud7ff\ue000\U0010ffff",
    ]
    whitespace = [space * count for space in " \t\n" for count in (1, 2, 3, 4, 7, 8, 16, 33)]
    whitespace += [" \n \n", "\t \t", "a  b   c    d", "  lead", "trail  ", "\r\n\r\nx", "a\n\n\n b"]
    numbers = [f"{prefix}{number}" for prefix in ("", " ", "x", "\n") for number in (0, 7, 42, 100, 65536)]
    spaced = [f"{gap}{digit}{gap}" for gap in ("  ", "   ", "\t\t", " \n", "\n\n") for digit in (1, 23)]
    halves = [seed[: len(seed) // 2] for seed in seeds] + [seed[len(seed) // 2 :] for seed in seeds]
    cased = [seed.upper() for seed in seeds] + [seed.title() for seed in seeds]
    joined = [f"{a} {b}" for a, b in itertools.pairwise(seeds)]
    reversed_seeds = [seed[::-1] for seed in seeds]
    return ["", *seeds, *whitespace, *numbers, *spaced, *halves, *cased, *joined, *reversed_seeds]


def test_texts_become_the_ids_that_transformers_gives(source: Path, folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = reference_tokenizer(source).backend_tokenizer
    # transformers cuts every GGUF file of this family as GPT-2 does; this model was trained with lone digits.
    reference.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    for text in texts():
        ids = ours.encode(text).ids
        assert ids == reference.encode(text).ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.get_vocab_size() == reference.get_vocab_size() == 49152


def test_special_tokens_and_template_are_the_models(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    ours = AutoTokenizer.from_pretrained(folder)
    reference = reference_tokenizer(source)
    messages = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
    for add_generation_prompt in (False, True):
        options = {"add_generation_prompt": add_generation_prompt, "return_dict": False}
        ids = ours.apply_chat_template(messages, **options)
        assert ids == reference.apply_chat_template(messages, **options)
    assert ours.decode(ids, skip_special_tokens=True).startswith("system\nYou are a helpful AI assistant")
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 2)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    special = {str(token) for token in ours.added_tokens_decoder.values() if token.special}
    assert special == {str(token) for token in reference.added_tokens_decoder.values() if token.special}
    assert {"<|endoftext|>", "<|im_start|>", "<|im_end|>"} <= special


def test_weights_are_those_that_transformers_reads(source: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(folder / "model.safetensors")
    assert set(ours) == set(reference)
    for name, values in ours.items():
        assert torch.equal(values, torch.as_tensor(reference[name])), name


def test_the_converted_model_speaks_sense(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith("The capital of France is Paris")
