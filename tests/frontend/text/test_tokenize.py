from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, processors

from streamserve.errors import ConfigError
from streamserve.frontend.text.tokenize import PromptTokenizer, read_json


def copy_of(tokenizer: Any) -> Any:
    return Tokenizer.from_str(tokenizer.to_str())


@pytest.fixture
def adds_bos(tokenizer: Any) -> Any:
    """A tokenizer that begins every text with BOS, and would end it with EOS."""
    tokenizer = copy_of(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    return tokenizer


def test_text_is_encoded_without_truncation_or_padding(tokenizer: Any) -> None:
    limited = copy_of(tokenizer)
    limited.enable_truncation(3)
    limited.enable_padding(length=100)
    text = "the quick brown fox jumps over the lazy dog"
    ids = PromptTokenizer(limited).encode(text, adds_bos=True)
    assert ids.dtype.name == "int32"
    assert ids.tolist() == tokenizer.encode(text).ids


def test_special_tokens_in_a_chat_are_recognised(tokenizer: Any) -> None:
    ids = PromptTokenizer(tokenizer).encode("<|im_start|>user", adds_bos=False)
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")


@pytest.mark.parametrize("text", ["hello", "<|im_start|>hello", "<|im_start|><|im_start|>hello"])
def test_a_completion_begins_with_exactly_one_bos(adds_bos: Any, text: str) -> None:
    ids = PromptTokenizer(adds_bos, "<|im_start|>").encode(text, adds_bos=True).tolist()
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert 2 not in ids


def test_an_empty_completion_is_bos_if_there_is_one(adds_bos: Any, tokenizer: Any) -> None:
    assert PromptTokenizer(adds_bos, "<|im_start|>").encode("", adds_bos=True).tolist() == [1]
    assert PromptTokenizer(tokenizer, "<|im_start|>").encode("", adds_bos=True).tolist() == []


def test_in_a_chat_the_template_has_the_say(adds_bos: Any) -> None:
    tokenizer = PromptTokenizer(adds_bos, "<|im_start|>")
    assert tokenizer.encode("hello", adds_bos=False).tolist()[0] != 1
    assert tokenizer.encode("<|im_start|>hello", adds_bos=False).tolist()[:2].count(1) == 1


def test_no_token_stands_for_more_characters_than_the_bound(tokenizer: Any) -> None:
    prompts = PromptTokenizer(tokenizer)
    for text in ("a" * 1000, " " * 1000, "the quick brown fox" * 50, "日本" * 100):
        assert len(text) <= prompts.max_token_chars * len(prompts.encode(text, adds_bos=True))


def test_a_normalizer_that_shortens_raises_the_bound(tokenizer: Any) -> None:
    plain = PromptTokenizer(tokenizer).max_token_chars
    composing = copy_of(tokenizer)
    composing.normalizer = normalizers.NFC()
    assert PromptTokenizer(composing).max_token_chars > plain


def test_loading(model_folder: Path, tokenizer: Any) -> None:
    loaded = PromptTokenizer.load(model_folder, None)
    assert loaded.encode("hello", adds_bos=True).tolist() == tokenizer.encode("hello").ids


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        PromptTokenizer.load(tmp_path, None)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 1}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        PromptTokenizer.load(tmp_path, None)


def test_json_files(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_json(path) == {}
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    for bad in ("[1]", "{", ""):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"x\.json"):
            read_json(path)
