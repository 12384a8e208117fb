from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.frontend.text.stops import StopMatcher, StopStrings


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that ends first wins; of several that end there, the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def feed(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stops))
    shown = "".join(matcher.decode(piece) for piece in pieces)
    return (shown if matcher.matched else shown + matcher.flush()), matcher.matched


alphabet = st.text("abc", max_size=30)


@given(alphabet, st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_any_split_gives_what_a_search_of_the_whole_text_gives(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    assert feed(pieces, stops) == reference(text, stops)


@given(alphabet, st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4))
def test_only_a_suffix_that_is_the_beginning_of_a_stop_string_is_held_back(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown = ""
    for char in text:
        shown += matcher.decode(char)
        if matcher.matched:
            return
    held = text[len(shown) :]
    assert text.startswith(shown)
    assert not held or any(stop.startswith(held) for stop in stops)
    assert not any(text.endswith(stop[: len(held) + 1]) for stop in stops if len(stop) > len(held) + 1)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "matched"),
    [
        (["one two", " th", "ree four"], ["three"], "one two ", "three"),
        (["abc"], ["bc", "abc"], "", "abc"),
        (["xabc"], ["b", "abc"], "xa", "b"),
        (["aa", "ab"], ["aab"], "a", "aab"),
        (["\n", "\n", "x"], ["\n\n"], "", "\n\n"),
        (["no", "thing"], ["zzz"], "nothing", None),
        (["end zz"], ["zzz"], "end zz", None),
        (["stop stop"], ["stop"], "", "stop"),
        (["naïve 日", "本 text"], ["日本"], "naïve ", "日本"),
    ],
)
def test_literal_cases(pieces: list[str], stops: list[str], shown: str, matched: str | None) -> None:
    assert feed(pieces, stops) == (shown, matched)


def test_texts_with_the_same_stop_strings_know_nothing_of_each_other() -> None:
    strings = StopStrings(["stop"])
    one, other = StopMatcher(strings), StopMatcher(strings)
    assert (one.decode("a st"), other.decode("op")) == ("a ", "op")
    assert (one.decode("op"), one.matched, other.matched) == ("", "stop", None)


def test_nothing_is_shown_after_the_stop_string() -> None:
    matcher = StopMatcher(StopStrings(["."]))
    assert matcher.decode("a.b") == "a"
    assert matcher.decode("more") == ""
    assert matcher.flush() == ""
