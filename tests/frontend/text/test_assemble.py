from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from streamserve.frontend.text.assemble import StopRules, TextAssembler
from streamserve.frontend.text.stops import StopStrings
from streamserve.messages import Finish

NONE, STOP, LENGTH = int(Finish.NONE), int(Finish.STOP), int(Finish.LENGTH)


class Letters:
    """Token n is the n-th letter; 99 is half a character that is completed by the next token."""

    def __init__(self) -> None:
        self._pending = ""

    def decode(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            if token == 99:
                self._pending = "?"
            else:
                text += self._pending + chr(ord("a") + token)
                self._pending = ""
        return text

    def flush(self) -> str:
        text, self._pending = self._pending, ""
        return text


def run(
    deltas: list[tuple[list[int], int]], strings: Sequence[str] = (), **rules: Any
) -> tuple[str, TextAssembler]:
    assembler = TextAssembler(Letters(), StopRules(StopStrings(strings), **rules))
    return "".join(assembler.accept(tokens, finish) for tokens, finish in deltas), assembler


def test_the_stop_token_is_counted_but_not_shown() -> None:
    text, end = run([([0, 1], NONE), ([2, 7], STOP)])
    assert (text, end.num_tokens, end.finish_reason, end.stop_reason) == ("abc", 4, "stop", None)


def test_the_callers_own_stop_token_is_named() -> None:
    _, end = run([([0, 7], STOP)], token_ids=frozenset([7]))
    assert end.stop_reason == 7


def test_at_the_length_limit_all_is_shown() -> None:
    text, end = run([([0, 1], NONE), ([2], LENGTH)])
    assert (text, end.num_tokens, end.finish_reason) == ("abc", 3, "length")


def test_half_a_character_is_flushed_at_the_end() -> None:
    text, _ = run([([0, 99], NONE), ([], LENGTH)])
    assert text == "a?"


@pytest.mark.parametrize(
    "deltas",
    [
        [([0, 1, 2, 3, 4], NONE)],
        [([0], NONE), ([1], NONE), ([2], NONE), ([3], NONE), ([4], NONE)],
        [([0, 1], NONE), ([2, 3, 4], LENGTH)],
        [([0, 1], NONE), ([2, 3, 4], STOP)],
    ],
)
def test_a_stop_string_cuts_text_and_count_however_deltas_are_merged(
    deltas: list[tuple[list[int], int]],
) -> None:
    text, end = run(deltas, strings=["cd"])
    assert (text, end.num_tokens, end.finish_reason, end.stop_reason) == ("ab", 4, "stop", "cd")


@pytest.mark.parametrize("finish", [LENGTH, STOP])
def test_what_was_held_back_is_flushed_when_the_text_ends_otherwise(finish: int) -> None:
    text, end = run([([0, 2], NONE), ([5] if finish == STOP else [], finish)], strings=["cd"])
    assert text == "ac"
    assert end.stop_reason is None


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    text, end = run([([0, 1, 0, 1, 2], LENGTH)], strings=["b"], min_tokens=2)
    assert (text, end.num_tokens) == ("aba", 4)


def test_a_stop_string_may_end_in_a_flushed_character() -> None:
    text, end = run([([0, 1, 99], LENGTH)], strings=["b?"])
    assert (text, end.finish_reason, end.stop_reason) == ("a", "stop", "b?")
