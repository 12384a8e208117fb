from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from streamserve.errors import ConfigError
from streamserve.frontend.text.tokenize import SHORT, PromptTokenizer, read_json


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


# Those that hold the interpreter lock leave no turn at all.
LEAST_TURNS = 5


async def test_a_long_text_leaves_the_interpreter_to_others(
    tokenizer: Any, turns_during: Callable[..., Any]
) -> None:
    prompts = PromptTokenizer(tokenizer)
    turns, ids = await turns_during(lambda: prompts.encode("q z x" * 60_000, adds_bos=True))
    assert len(ids) > 150_000
    assert turns >= LEAST_TURNS


async def test_a_long_list_of_ids_does_too(tokenizer: Any, turns_during: Callable[..., Any]) -> None:
    prompts = PromptTokenizer(tokenizer)
    turns, text = await turns_during(lambda: prompts.decode([100, 200, 300] * 200_000))
    assert len(text) > 200_000
    assert turns >= LEAST_TURNS


async def test_many_words_do_too(tokenizer: Any, turns_during: Callable[..., Any]) -> None:
    prompts = PromptTokenizer(tokenizer)
    turns, found = await turns_during(lambda: prompts.words([f"{n} q z x" * 2000 for n in range(64)]))
    assert len(found) == 128
    assert turns >= LEAST_TURNS


def variants(tokenizer: Any, fallback_tokenizer: Any) -> list[Any]:
    normalizing, digits = copy_of(tokenizer), copy_of(tokenizer)
    normalizing.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    level = pre_tokenizers.ByteLevel(add_prefix_space=True)
    digits.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    metaspace = copy_of(fallback_tokenizer)
    metaspace.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return [tokenizer, normalizing, digits, fallback_tokenizer, metaspace]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["the quick ", "日本", "<tool>", "<|im_end|>", "<|im_start|>", "é\u0301", "😊", " \n", "12", "Á"]
        )
        | st.text(max_size=4),
        min_size=1,
        max_size=20,
    )
)
def test_a_long_text_has_the_ids_of_the_same_text_if_it_were_short(
    tokenizer: Any, fallback_tokenizer: Any, parts: list[str]
) -> None:
    text = "".join(parts)
    text *= SHORT // max(1, len(text)) + 1
    for variant in variants(tokenizer, fallback_tokenizer):
        prompts = PromptTokenizer(variant)
        ids = variant.encode(text, add_special_tokens=False).ids
        assert prompts.encode(text, adds_bos=True).tolist() == ids
        assert prompts.decode(ids) == variant.decode(ids, skip_special_tokens=False)
        assert prompts.words(parts) == prompts.words([*parts, " " * SHORT])[: len(prompts.words(parts))]


def test_any_number_of_bos_at_the_start_is_one(adds_bos: Any) -> None:
    prompts = PromptTokenizer(adds_bos, "<|im_start|>")
    for text in ("<|im_start|>" * 50_000, "<|im_start|>" * 50_000 + "hello"):
        assert prompts.encode(text, adds_bos=True).tolist().count(1) == 1
        assert prompts.encode(text, adds_bos=False).tolist().count(1) == 1


def test_words_at_the_start_of_a_text_and_within_it(tokenizer: Any) -> None:
    found = PromptTokenizer(tokenizer).words(["fox", " dog", "fox", ""])
    spelled = ["fox", " fox", " dog", " "]
    assert found == [tuple(tokenizer.encode(text).ids) for text in spelled]


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
