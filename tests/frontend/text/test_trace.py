"""Each token's part of the text: whatever is held back or cut, the parts join to the text."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.frontend.text.assemble import StopRules, TextAssembler
from streamserve.frontend.text.detokenize import Detokenizers
from streamserve.frontend.text.trace import TokenTrace, TracedToken
from streamserve.messages import Finish

NONE, STOP, LENGTH = int(Finish.NONE), int(Finish.STOP), int(Finish.LENGTH)


class Traced:
    """An assembler and its trace, fed together."""

    def __init__(self, detokenizer: Any, **rules: Any) -> None:
        self.trace = TokenTrace()
        self.assembler = TextAssembler(detokenizer, StopRules(**rules), self.trace)
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
        return "".join(token.text for token in self.tokens) + self.trace.rest


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


def test_half_a_character_whose_token_is_gone_is_the_rest() -> None:
    class Mixed(Words):
        """Every token is a letter and the beginning of another."""

        def decode(self, ids: Any) -> str:
            self._pending = "�"
            return "a"

    traced = Traced(Mixed())
    assert traced.accept([0]) == ["a"]
    assert traced.accept([], LENGTH) == []
    assert (traced.shown, traced.text, traced.trace.rest) == ("a�", "a�", "�")


texts = st.text(st.sampled_from("abc é語😊\n"), max_size=30)


@settings(deadline=None)
@given(texts, st.lists(st.text("abc é", min_size=1, max_size=4), max_size=3), st.data())
def test_parts_join_to_the_text_however_deltas_are_cut(
    tokenizer: Any, text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = tokenizer.encode(text).ids
    detokenizers = Detokenizers(tokenizer)
    finish = data.draw(st.sampled_from([STOP, LENGTH]))
    shows_stop = data.draw(st.booleans())
    traced = Traced(detokenizers.start(), strings=stops, shows_stop=shows_stop)
    whole = TextAssembler(detokenizers.start(), StopRules(stops, shows_stop=shows_stop))
    expected = whole.accept(ids, finish)
    at = 0
    while at < len(ids) and traced.assembler.finish_reason is None:
        end = data.draw(st.integers(at + 1, len(ids)))
        traced.accept(ids[at:end], finish if end == len(ids) else NONE)
        at = end
    if not ids:
        traced.accept([], finish)
    assert traced.shown == traced.text == expected
    assert traced.assembler.num_tokens == whole.num_tokens
    assert len(traced.tokens) <= whole.num_tokens
    # What was not at the end came with text of its own.
    assert all("".join(token.text for token in chunk) for chunk in traced.chunks[:-1] if chunk)
