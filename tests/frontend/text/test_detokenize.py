from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from streamserve.frontend.text.detokenize import MAX_BYTE_RUN, MAX_WINDOW_PENDING, Detokenizers

BYTE_0 = 3  # id of <0x00> in the byte-fallback tokenizer
FIRST_WORD = 259


def deltas(detokenizers: Detokenizers, ids: list[int], chunk: int = 1, **options: bool) -> list[str]:
    detokenizer = detokenizers.start(**options)
    parts = [detokenizer.decode(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
    return [*parts, detokenizer.flush()]


@pytest.fixture(scope="module")
def byte_level(tokenizer: Any) -> Detokenizers:
    return Detokenizers(tokenizer)


@pytest.fixture(scope="module")
def byte_fallback(fallback_tokenizer: Any) -> Detokenizers:
    return Detokenizers(fallback_tokenizer)


@given(
    ids=st.lists(st.integers(0, 420), max_size=40),
    chunk=st.integers(1, 5),
    skip=st.booleans(),
)
@settings(max_examples=300)
def test_byte_level_deltas_join_to_the_full_decode(
    tokenizer: Any, byte_level: Detokenizers, ids: list[int], chunk: int, skip: bool
) -> None:
    parts = deltas(byte_level, ids, chunk, skip_special_tokens=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=20), chunk=st.integers(1, 5))
@example("😊👩‍👩‍👧‍👦 日本語", 1)
def test_no_delta_of_a_valid_text_has_half_a_character(
    tokenizer: Any, byte_level: Detokenizers, text: str, chunk: int
) -> None:
    parts = deltas(byte_level, tokenizer.encode(text, add_special_tokens=False).ids, chunk)
    assert "".join(parts) == text
    if "�" not in text:
        assert not any("�" in part for part in parts)


fallback_ids = st.lists(
    st.one_of(st.integers(0, FIRST_WORD + 9), st.integers(FIRST_WORD, FIRST_WORD + 8)), max_size=40
)


def longest_byte_run(ids: list[int]) -> int:
    longest = run = 0
    for token_id in ids:
        # Special tokens are skipped before anything else and do not end a run.
        if BYTE_0 <= token_id < FIRST_WORD:
            run += 1
        elif FIRST_WORD <= token_id < FIRST_WORD + 9:
            run = 0
        longest = max(longest, run)
    return longest


@given(ids=fallback_ids, chunk=st.integers(1, 5), skip=st.booleans())
@settings(max_examples=300)
@example([*b"", FIRST_WORD, *(BYTE_0 + byte for byte in "語".encode()), FIRST_WORD], 1, True)
@example([FIRST_WORD + 5, FIRST_WORD + 1, FIRST_WORD], 1, True)
def test_byte_fallback_deltas_join_to_the_full_decode(
    fallback_tokenizer: Any, byte_fallback: Detokenizers, ids: list[int], chunk: int, skip: bool
) -> None:
    parts = deltas(byte_fallback, ids, chunk, skip_special_tokens=skip)
    if longest_byte_run(ids) < MAX_BYTE_RUN:
        assert "".join(parts) == fallback_tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60), chunk=st.integers(1, 5))
def test_byte_fallback_shows_any_valid_text_whatever_its_length(
    fallback_tokenizer: Any, byte_fallback: Detokenizers, text: str, chunk: int
) -> None:
    ids = [BYTE_0 + byte for byte in text.encode()]
    parts = deltas(byte_fallback, ids, chunk)
    assert "".join(parts) == fallback_tokenizer.decode(ids)


def test_a_stripped_space_is_kept_where_the_text_goes_on_from_a_prompt(byte_fallback: Detokenizers) -> None:
    the = FIRST_WORD
    assert "".join(deltas(byte_fallback, [the, the])) == "the the"
    assert "".join(deltas(byte_fallback, [the, the], continues=True)) == " the the"


def test_spaces_in_front_are_not_lost(tokenizer: Any, byte_level: Detokenizers) -> None:
    for text in (" world", "    return 1", "a    b", "\n\n 3)"):
        assert "".join(deltas(byte_level, tokenizer.encode(text).ids)) == text


def test_without_strip_nothing_is_stripped(make_fallback_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_fallback_tokenizer(strip=0)
    ids = [FIRST_WORD, FIRST_WORD]
    assert "".join(deltas(Detokenizers(tokenizer), ids)) == tokenizer.decode(ids) == " the the"


@pytest.fixture(scope="module")
def word_piece() -> Any:
    vocab = {"[UNK]": 0, "the": 1, "fox": 2, "##es": 3, ".": 4, "##s": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


@given(ids=st.lists(st.integers(0, 5), max_size=30), chunk=st.integers(1, 4))
def test_other_tokenizers_are_decoded_in_a_window(word_piece: Any, ids: list[int], chunk: int) -> None:
    assert "".join(deltas(Detokenizers(word_piece), ids, chunk)) == word_piece.decode(ids)


def test_a_tokenizer_without_decoder_joins_with_spaces(word_piece: Any) -> None:
    plain = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert "".join(deltas(Detokenizers(plain), [0, 1, 1])) == plain.decode([0, 1, 1]) == "a b b"


def test_ids_outside_the_tokenizer_are_nothing(byte_level: Detokenizers, byte_fallback: Detokenizers) -> None:
    assert "".join(deltas(byte_level, [100_000])) == ""
    assert "".join(deltas(byte_level, [100_000, 100_001], chunk=2)) == ""
    assert "".join(deltas(byte_fallback, [100_000])) == ""


def lone_byte(detokenizers: Detokenizers, token_id: int, count: int) -> float:
    detokenizer = detokenizers.start()
    begin = time.process_time()
    for _ in range(count):
        detokenizer.decode((token_id,))
    return time.process_time() - begin


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "window"])
def test_a_run_of_lone_continuation_bytes_is_shown_and_costs_the_same_for_each_token(
    kind: str, tokenizer: Any, fallback_tokenizer: Any
) -> None:
    if kind == "window":
        fallback_tokenizer = Tokenizer.from_str(fallback_tokenizer.to_str())
        # A form that the table way does not know.
        fallback_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    used = Detokenizers(tokenizer if kind == "byte_level" else fallback_tokenizer)
    lone = tokenizer.token_to_id("¢") if kind == "byte_level" else BYTE_0 + 0xA2
    detokenizer = used.start()
    silent = 0
    for _ in range(200):
        silent = 0 if detokenizer.decode((lone,)) else silent + 1
        assert silent <= max(MAX_BYTE_RUN, MAX_WINDOW_PENDING)
    # Quadratic work would make eight times the tokens cost sixty-four times as much.
    short = min(lone_byte(used, lone, 500) for _ in range(3))
    long = lone_byte(used, lone, 4000)
    assert long < 30 * short + 0.05
