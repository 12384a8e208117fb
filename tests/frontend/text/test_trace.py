"""Each token's part of the text: whatever is held back or cut, the parts join to the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.frontend.text.assemble import StopRules, TextAssembler
from streamserve.frontend.text.detokenize import Detokenizers
from streamserve.frontend.text.stops import StopStrings
from streamserve.frontend.text.trace import TokenTrace, TracedToken
from streamserve.messages import Finish, Logprobs

NONE, STOP, LENGTH = int(Finish.NONE), int(Finish.STOP), int(Finish.LENGTH)


class Traced:
    """An assembler and its trace, fed together."""

    def __init__(self, detokenizer: Any, strings: Sequence[str] = (), **rules: Any) -> None:
        self.trace = TokenTrace()
        self.assembler = TextAssembler(detokenizer, StopRules(StopStrings(strings), **rules), self.trace)
        self.shown = ""
        self.tokens: list[TracedToken] = []
        self.chunks: list[list[TracedToken]] = []

    def accept(self, tokens: list[int], finish: int = NONE) -> list[str]:
        self.shown += self.assembler.accept(tokens, finish)
        taken = self.trace.take()
        self.tokens += taken
        self.chunks.append(taken)
        return [token.text for token in taken]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class Words:
    """Token n is the n-th of some words; a word in brackets waits until the next one."""

    def __init__(self, *words: str) -> None:
        self._words = words
        self._pending = ""

    def decode(self, ids: Any) -> str:
        text = ""
        for token in ids:
            word = self._words[token]
            if word.startswith("("):
                self._pending += word.strip("()")
            else:
                text += self._pending + word
                self._pending = ""
        return text

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def flush(self) -> str:
        pending, self._pending = self._pending, ""
        return pending


def test_tokens_come_with_their_text() -> None:
    traced = Traced(Words("ab", "c", "d"))
    assert traced.accept([0, 1]) == ["ab", "c"]
    assert traced.accept([2], LENGTH) == ["d"]


def test_the_beginning_of_a_character_waits_for_its_end() -> None:
    traced = Traced(Words("a", "(é)", "x"))
    assert traced.accept([0, 1]) == ["a"]
    assert traced.accept([2]) == ["", "éx"]


def test_a_token_whose_end_may_begin_a_stop_string_waits_whole() -> None:
    traced = Traced(Words("ab", "cx", "c", "d"), strings=["bcd"])
    assert traced.accept([0]) == []
    assert traced.accept([1]) == ["ab", "cx"]
    assert traced.accept([0, 2]) == []
    assert traced.accept([3], LENGTH) == ["a"]
    assert (traced.shown, traced.text) == ("abcxa", "abcxa")


def test_tokens_behind_a_stop_string_are_gone() -> None:
    traced = Traced(Words("a", "b", "c"), strings=["b"])
    assert traced.accept([0, 1, 2, 2]) == ["a"]
    assert traced.assembler.num_tokens == 2


def test_a_shown_stop_string_is_cut_behind_its_end() -> None:
    traced = Traced(Words("ab", "cd"), strings=["bc"], shows_stop=True)
    assert traced.accept([0, 1]) == ["ab", "c"]


def test_the_stop_token_comes_last_and_is_no_text() -> None:
    traced = Traced(Words("a", "(é)", "."))
    assert traced.accept([0, 1, 2], STOP) == ["a", "é", ""]
    assert [token.is_text for token in traced.tokens] == [True, True, False]
    shown = Traced(Words("a", "."), shows_stop=True)
    assert shown.accept([0, 1], STOP) == ["a", "."]


def test_a_token_that_ends_with_half_a_character_waits_for_the_next() -> None:
    class Mixed(Words):
        """Every token is a letter and the beginning of another."""

        def decode(self, ids: Any) -> str:
            self._pending = "�"
            return "a"

    traced = Traced(Mixed())
    assert traced.accept([0]) == []
    assert traced.accept([0]) == ["a"]
    assert traced.accept([], LENGTH) == ["a�"]
    assert traced.shown == traced.text == "aa�"


PIECES = ["ab", "c", " ", "é", "語", "😊", "\n", "the quick", "<|im_end|>", "<|im_start|>", "日本"]
texts = st.lists(st.sampled_from(PIECES), max_size=15).map("".join)


@st.composite
def cut_anywhere(draw: st.DrawFn, tokenizer: Any) -> tuple[list[int], list[str]]:
    """Token ids, some of which leave characters half done, and stop strings that may be in their text."""
    ids: list[int] = tokenizer.encode(draw(texts), add_special_tokens=False).ids
    if ids and draw(st.booleans()):
        del ids[draw(st.integers(0, len(ids) - 1))]
    text = tokenizer.decode(ids)
    stops = draw(st.lists(st.text("abc é", min_size=1, max_size=4), max_size=2))
    if text:
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 4))] + draw(st.sampled_from(["", "", "zz"])))
    return ids, stops


def numbered(ids: list[int], first: int) -> Logprobs:
    """A row for each of `ids`, which says which token of the answer it is."""
    empty = np.zeros((len(ids), 0), dtype=np.float32)
    return Logprobs(np.arange(first, first + len(ids), dtype=np.float32), empty.astype(np.int32), empty)


def told(detokenizer: Any, rules: StopRules, deltas: list[tuple[list[int], int]], looks: list[bool]) -> Any:
    """The text, its tokens, and the ids of those that were cut off, for somebody who looks now and then."""
    trace = TokenTrace()
    assembler = TextAssembler(detokenizer, rules, trace)
    text, at = "", 0
    tokens: list[TracedToken] = []
    for (ids, finish), is_looking in zip(deltas, looks, strict=True):
        text += assembler.accept(ids, finish, numbered(ids, at))
        at += len(ids)
        if is_looking or assembler.finish_reason is not None:
            taken = trace.take()
            # What is not at the end comes with text of its own.
            assert assembler.finish_reason is not None or not taken or taken[-1].text
            tokens += taken
        if assembler.finish_reason is not None:
            break
    assert assembler.finish_reason is not None
    assert trace.take() == []
    assert text == "".join(token.text for token in tokens)
    ids = [token.token for token in tokens]
    places = [token.place.logprobs.chosen[token.place.at] for token in tokens if token.place is not None]
    assert places == list(range(len(tokens)))
    assert assembler.num_tokens == len(ids) + len(trace.cut)
    return text, [token._replace(place=None) for token in tokens], ids + trace.cut


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_it_makes_no_difference_how_tokens_come_and_when_somebody_looks(
    tokenizer: Any, data: st.DataObject
) -> None:
    ids, stops = data.draw(cut_anywhere(tokenizer))
    finish = data.draw(st.sampled_from([STOP, LENGTH]))
    rules = StopRules(
        StopStrings(stops),
        min_tokens=data.draw(st.sampled_from([0, 0, 3])),
        shows_stop=data.draw(st.booleans()),
    )
    detokenizers = Detokenizers(tokenizer)
    skips = data.draw(st.booleans())
    ends = sorted(data.draw(st.sets(st.integers(1, max(1, len(ids) - 1)))) | {len(ids)})
    starts = [0, *ends[:-1]]
    deltas = [
        (ids[start:end], finish if end == len(ids) else NONE)
        for start, end in zip(starts, ends, strict=True)
        if start < end or end == len(ids)
    ]
    looks = data.draw(st.lists(st.booleans(), min_size=len(deltas), max_size=len(deltas)))
    at_once = told(detokenizers.start(skip_special_tokens=skips), rules, [(ids, finish)], [True])
    in_parts = told(detokenizers.start(skip_special_tokens=skips), rules, deltas, looks)
    assert in_parts == at_once
    assert ids[: len(at_once[2])] == at_once[2]
    plain = TextAssembler(detokenizers.start(skip_special_tokens=skips), rules)
    assert plain.accept(ids, finish) == at_once[0]


def test_a_special_token_before_a_held_back_one_keeps_its_place() -> None:
    traced = Traced(Words("abc", ""), strings=["cZ"])
    assert traced.accept([1]) == []
    assert traced.accept([0]) == []
    assert traced.accept([1, 0]) == ["", "abc"]
    assert traced.accept([1], LENGTH) == ["", "abc", ""]
