"""Which part of the shown text each token is."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class TracedToken(NamedTuple):
    """A token of the answer and its part of the text.

    Attributes:
        token: its id.
        text: may be empty: a special token, or the beginning of a character that a later token completes. The
            texts of all tokens of an answer, joined, are the answer's text.
        is_text: False for a token that ended the text and is no part of it.
    """

    token: int
    text: str
    is_text: bool = True


class TokenTrace:
    """Hands out tokens as their text is shown, each one whole.

    Text is shown up to any character (what follows may still become a stop string), so a token whose text is
    only partly shown waits until the rest is, or until the text ends within it.

    Attributes:
        rest: shown at the very end although no token is left for it: half a character, where the token that
            began it has long been taken with the text before.
    """

    def __init__(self) -> None:
        self.rest = ""
        self._waiting: deque[TracedToken] = deque()
        # Shown characters that belong to waiting tokens.
        self._num_shown = 0
        self._has_ended = False

    def add(self, token: int, text: str, *, is_text: bool = True) -> None:
        """The next token and what it adds to the text, shown or not."""
        self._waiting.append(TracedToken(token, text, is_text))

    def extend_last(self, text: str) -> None:
        """More text from the tokens that are there: half a character that nothing completed."""
        if self._waiting:
            last = self._waiting.pop()
            self._waiting.append(last._replace(text=last.text + text))
        else:
            self.rest = text

    def show(self, num_chars: int) -> None:
        """So many more characters of the text are shown."""
        self._num_shown += num_chars

    def end(self) -> None:
        """The text is over; what is not shown by now never is."""
        self._has_ended = True

    def take(self) -> list[TracedToken]:
        """The tokens whose text is shown now and was not before."""
        taken: list[TracedToken] = []
        waiting = self._waiting
        while waiting and len(waiting[0].text) <= self._num_shown and self._may_go():
            self._num_shown -= len(waiting[0].text)
            taken.append(waiting.popleft())
        if self._has_ended:
            if waiting and self._num_shown:
                taken.append(waiting[0]._replace(text=waiting[0].text[: self._num_shown]))
            waiting.clear()
            self.rest = self.rest[: self._num_shown]
        return taken

    def _may_go(self) -> bool:
        """Whether the first token need not wait for the one that completes its character."""
        return self._has_ended or self._num_shown > 0 or bool(self._waiting[0].text)
