"""Which part of the shown text each token is."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import NamedTuple

from streamserve.messages import Logprobs


class Place(NamedTuple):
    """Where the log probabilities of a token are: row `at` of `logprobs`."""

    logprobs: Logprobs
    at: int


class TracedToken(NamedTuple):
    """A token of the answer, its part of the text, and all that is known of it.

    Attributes:
        token: its id.
        text: may be empty: a special token, or the beginning of a character that a later token completes. The
            texts of all tokens of an answer, joined, are the answer's text.
        is_text: False for a token that ended the text and is no part of it.
        place: of its log probabilities; None if nobody asked for them, or nothing comes before it.
    """

    token: int
    text: str
    is_text: bool = True
    place: Place | None = None


class TokenTrace:
    """Hands out tokens as their text is shown, each one whole.

    Text is shown up to any character (what follows may still become a stop string), so a token whose text is
    only partly shown waits until the rest is, or until the text ends within it. Tokens without text wait for
    the next one that has some, and go with it. So it makes no difference when the text is shown and when
    somebody takes what there is: the tokens are the same, with the same texts, in the same order.

    Attributes:
        cut: once the text has ended, the ids of the tokens that nothing is left of.
    """

    def __init__(self) -> None:
        self.cut: list[int] = []
        # The last token of each group has text, and gets no more of it; those before it have none.
        self._groups: deque[list[TracedToken]] = deque()
        # Those behind all groups: only the last one may have text.
        self._open: list[TracedToken] = []
        # Shown characters that belong to waiting tokens.
        self._num_shown = 0
        self._has_ended = False

    def add(self, traced: TracedToken, *, is_whole: bool = True) -> None:
        """The next token and what it adds to the text, shown or not.

        Args:
            is_whole: it does not leave a character half done.
        """
        if self._open and self._open[-1].text:
            self._close_group()
        self._open.append(traced)
        if traced.text and is_whole:
            self._close_group()

    def extend_last(self, text: str) -> None:
        """More text from the last token: half a character that nothing completed."""
        last = self._open[-1]
        self._open[-1] = last._replace(text=last.text + text)
        self._close_group()

    def show(self, num_chars: int) -> None:
        """So many more characters of the text are shown."""
        self._num_shown += num_chars

    def end(self) -> None:
        """The text is over; what is not shown by now never is."""
        self._has_ended = True

    def take(self) -> list[TracedToken]:
        """The tokens whose text is shown now and was not before; before the end, always with some text."""
        taken: list[TracedToken] = []
        groups = self._groups
        while groups and len(groups[0][-1].text) <= self._num_shown:
            group = groups.popleft()
            self._num_shown -= len(group[-1].text)
            taken += group
        if self._has_ended:
            self._take_end(taken)
        return taken

    def _close_group(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def _take_end(self, taken: list[TracedToken]) -> None:
        """Moves what is left to `taken`, up to the character at which the text has ended, or to `cut`."""
        num_shown, self._num_shown = self._num_shown, 0
        left = [*chain.from_iterable(self._groups), *self._open]
        self._groups.clear()
        self._open = []
        # A stop string has cut off text: of some token the end, or all of it.
        at = next((at for at, traced in enumerate(left) if traced.text), len(left))
        taken += left[:at]
        if at < len(left) and num_shown:
            taken.append(left[at]._replace(text=left[at].text[:num_shown]))
            at += 1
        self.cut += [traced.token for traced in left[at:]]
