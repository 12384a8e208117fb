from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamserve.artifacts.gguf_metadata import GgufMetadata
from streamserve.artifacts.gguf_tokenizer import TokenType, build_tokenizer, tokenizer_config
from streamserve.errors import ConfigError

# The letters that byte-level BPE shows spaces, newlines and the bytes of "é" as.
SPACE, NEWLINE, E_ACUTE = "Ġ", "Ċ", ("Ã", "©")
CONTROL = ["<|end|>", "<|start|>"]


def byte_level(pre: str | None, words: list[str] = [], **keys: Any) -> Any:  # noqa: B006
    """A tokenizer of printable ASCII, a few bytes, and `words` with the merges that make them."""
    letters = [chr(code) for code in range(33, 127)] + [SPACE, NEWLINE, *E_ACUTE]
    merges = []
    pieces: list[str] = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    tokens = CONTROL + letters + pieces
    values = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }
    if pre is not None:
        values["tokenizer.ggml.pre"] = pre
    values |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return GgufMetadata(Path("m.gguf"), values)


def pieces(metadata: Any, text: str) -> list[str]:
    tokens: list[str] = build_tokenizer(metadata).encode(text, add_special_tokens=False).tokens
    return tokens


DIGITS = ["12", "123", "1234", f"{SPACE}1", f"{SPACE}{SPACE}"]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("smollm", "a  1", ["a", f"{SPACE}{SPACE}", "1"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "a  1", ["a", SPACE, SPACE, "1"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("gpt-2", "1234", ["1234"]),
        ("gpt-2", "a  1", ["a", SPACE, f"{SPACE}1"]),
        ("default", "1234", ["1234"]),
        (None, "1234", ["1234"]),
    ],
)
def test_digits_and_spaces_are_cut_as_the_model_was_trained(
    pre: str | None, text: str, expected: list[str]
) -> None:
    assert pieces(byte_level(pre, DIGITS), text) == expected


def test_llama3_takes_a_whole_word_that_is_a_token() -> None:
    # "ab" joins before "bc": merging alone would never arrive at "abc" from "a" and "bc".
    words = byte_level("llama-bpe", ["ab", "bcd"])
    tokens = [*words.tokenizer("ggml.tokens"), "abcd"]
    metadata = byte_level(
        "llama-bpe", ["ab", "bcd"], tokens=tokens, token_type=[3, 3] + [1] * (len(tokens) - 2)
    )
    assert pieces(metadata, "abcd") == ["abcd"]
    metadata = byte_level("gpt-2", ["ab", "bcd"], tokens=tokens, token_type=[3, 3] + [1] * (len(tokens) - 2))
    assert pieces(metadata, "abcd") == ["ab", "c", "d"]


def test_qwen2_composes_characters_first() -> None:
    assert pieces(byte_level("qwen2"), "e\u0301") == list(E_ACUTE)
    with_parts = byte_level("gpt-2")
    assert pieces(with_parts, "\u00e9") == list(E_ACUTE)


def test_control_tokens_are_found_in_text_and_left_out_of_it() -> None:
    tokenizer = build_tokenizer(byte_level("smollm"))
    encoded = tokenizer.encode("<|start|>hi<|end|>")
    assert encoded.ids[0] == 1
    assert encoded.ids[-1] == 0
    assert tokenizer.decode(encoded.ids) == "hi"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<|start|>hi<|end|>"


def test_user_defined_tokens_are_found_and_kept() -> None:
    base = byte_level("smollm").tokenizer("ggml.tokens")
    tokens = [*base, "<tool>"]
    kinds = [3, 3] + [1] * (len(base) - 2) + [TokenType.USER_DEFINED]
    tokenizer = build_tokenizer(byte_level("smollm", tokens=tokens, token_type=kinds))
    encoded = tokenizer.encode("a<tool>b")
    assert encoded.ids[1] == len(base)
    assert tokenizer.decode(encoded.ids) == "a<tool>b"


@pytest.mark.parametrize("text", ["", " ", "  a \n\n b", "é", "don't (x)", "\n"])
def test_text_comes_back(text: str) -> None:
    for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2"):
        tokenizer = build_tokenizer(byte_level(pre, ["don", "'t"]))
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize(
    ("pre", "keys", "expected"),
    [
        ("smollm", {}, ["a"]),
        ("llama-bpe", {}, ["<|start|>", "a"]),
        ("llama-bpe", {"add_bos_token": False}, ["a"]),
        ("smollm", {"add_bos_token": True}, ["<|start|>", "a"]),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, ["<|start|>", "a", "<|end|>"]),
        ("smollm", {"add_eos_token": True}, ["a", "<|end|>"]),
    ],
)
def test_sequences_begin_and_end_as_the_file_says(
    pre: str, keys: dict[str, Any], expected: list[str]
) -> None:
    metadata = byte_level(pre, **keys)
    assert build_tokenizer(metadata).encode("a").tokens == expected
    config = tokenizer_config(metadata)
    assert config["add_bos_token"] is (expected[0] == "<|start|>")
    assert config["add_eos_token"] is (expected[-1] == "<|end|>")


def test_a_file_without_a_chat_template_gets_none() -> None:
    config = tokenizer_config(byte_level("smollm"))
    assert "chat_template" not in config
    assert "unk_token" not in config
    assert (config["bos_token"], config["eos_token"]) == ("<|start|>", "<|end|>")
    assert config["model_max_length"] == 64


def sentencepiece(**keys: Any) -> GgufMetadata:
    """Pieces of "hello", the best score first, behind the usual three and all single bytes."""
    scored = {"lo": -1.0, "he": -2.0, "ll": -3.0, "▁he": -4.0, "llo": -5.0, "▁hello": -6.0}
    singles = ["▁", "h", "e", "l", "o"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scored, *singles]
    scores = [0.0] * 259 + list(scored.values()) + [-100.0] * len(singles)
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(scored) + len(singles))
    values = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return GgufMetadata(Path("m.gguf"), values | {f"tokenizer.ggml.{key}": v for key, v in keys.items()})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # lo, he, ▁he, then l + lo make llo, and both halves the whole.
        ("hello", ["<s>", "▁hello"]),
        ("lo", ["<s>", "▁", "lo"]),
        ("hell", ["<s>", "▁he", "ll"]),
        ("hé", ["<s>", "▁", "h", "<0xC3>", "<0xA9>"]),
        (" ", ["<s>", "▁", "▁"]),
    ],
)
def test_scores_decide_what_sentencepiece_joins(text: str, expected: list[str]) -> None:
    tokenizer = build_tokenizer(sentencepiece())
    encoded = tokenizer.encode(text)
    assert encoded.tokens == expected
    assert tokenizer.decode(encoded.ids) == text


def test_sentencepiece_without_a_prefix_space() -> None:
    tokenizer = build_tokenizer(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("he").tokens == ["he"]
    assert tokenizer.decode(tokenizer.encode(" he").ids) == " he"


def test_an_unknown_way_to_cut_words_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'falcon'.*smollm"):
        build_tokenizer(byte_level("falcon"))
