"""Stop strings in a stream of text whose pieces may be cut anywhere.

The text ends at the stop string that is complete first; of several complete at the same character, the
longest counts. Each stop string is a Knuth-Morris-Pratt automaton whose state is the length of the longest
prefix of it that the text so far ends with. So the result does not depend on how the text was split, the cost
is flat for each character, and the largest state is exactly what has to be held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Stop strings, made ready once for all texts that they may end.

    Args:
        stops: none of them empty; may be none at all.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        # Longest first, so that the first complete one found is the longest.
        self.stops = sorted(set(stops), key=len, reverse=True)
        self.fallbacks = [_fallbacks(stop) for stop in self.stops]
        self.first_chars = frozenset(stop[0] for stop in self.stops)

    def __bool__(self) -> bool:
        return bool(self.stops)


class StopMatcher:
    """Releases text up to the first stop string, holding back only what may still become one.

    Args:
        strings: the stop strings.
        shows_match: the text ends behind the stop string instead of before it.

    Attributes:
        matched: the stop string that ended the text, or None.
    """

    def __init__(self, strings: StopStrings, *, shows_match: bool = False) -> None:
        self.matched: str | None = None
        self._shows_match = shows_match
        self._stops = strings.stops
        self._fallbacks = strings.fallbacks
        self._first_chars = strings.first_chars
        self._states = [0] * len(self._stops)
        self._held = ""

    def decode(self, text: str) -> str:
        """The part of all text so far that is new and safe to show. Once `matched`, always empty.

        Hot: once for each delta of a request with stop strings.
        """
        if self.matched is not None or not text:
            return ""
        if not self._held and not any(char in text for char in self._first_chars):
            return text
        for at, char in enumerate(text):
            index = self._advance(char)
            if index is not None:
                self.matched = self._stops[index]
                shown = self._held + text[: at + 1]
                self._held = ""
                return shown if self._shows_match else shown[: len(shown) - len(self.matched)]
        shown = self._held + text
        held = max(self._states)
        self._held = shown[len(shown) - held :]
        return shown[: len(shown) - held]

    def flush(self) -> str:
        """What is still held back, when the text ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int | None:
        """Feeds one character; returns the index of the stop string that it completes, if any."""
        for index, stop in enumerate(self._stops):
            state, fallbacks = self._states[index], self._fallbacks[index]
            while state and stop[state] != char:
                state = fallbacks[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                # Never read again: the text ends here.
                return index
            self._states[index] = state
        return None


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = table[length - 1]
        if stop[at] == stop[length]:
            length += 1
        table[at] = length
    return table
