"""Log probabilities as the API has them: in a chat, in a completion, and of a prompt.

A token is shown as its part of the text, so that the tokens of a chunk, joined, are its text. One that is no
text (it ended the answer, or is special and left out) is shown by its name in a chat, and as nothing in a
completion. JSON has no infinity; what is impossible has LOWEST.

What is told of a position, which may be of many tokens, is JSON at once: an answer with a great many
positions must not have to be encoded in one go. It takes less memory than objects do, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import orjson

from streamserve.frontend.text.detokenize import Detokenizers
from streamserve.frontend.text.trace import Place, TracedToken
from streamserve.messages import Logprobs

LOWEST = -9999.0


class Row(NamedTuple):
    """What is known of one position.

    Attributes:
        logprob: of the token that is there; None if nothing comes before it.
        top: the likeliest (token id, log probability), likeliest first.
    """

    logprob: float | None
    top: Sequence[tuple[int, float]]


_NO_ROW = Row(None, ())


def row_at(place: Place | None) -> Row:
    """The row, with finite numbers."""
    if place is None:
        return _NO_ROW
    logprobs, at = place
    ids, top = logprobs.top_ids[at].tolist(), logprobs.top[at].tolist()
    likeliest = [(token, _finite(logprob)) for token, logprob in zip(ids, top, strict=True)]
    return Row(_finite(logprobs.chosen[at].item()), likeliest)


def _finite(logprob: float) -> float:
    # Written so that it catches "not a number" too.
    return logprob if logprob > LOWEST else LOWEST


class TokenNames:
    """How tokens are called.

    Args:
        detokenizers: the model's.
        as_ids: by their ids instead of their text.
    """

    def __init__(self, detokenizers: Detokenizers, *, as_ids: bool = False) -> None:
        self._detokenizers = detokenizers
        self._as_ids = as_ids

    def of(self, token: int) -> str:
        """The name of a token by itself."""
        piece = self._detokenizers.piece(token)
        if self._as_ids or not piece:
            return f"token_id:{token}"
        if isinstance(piece, str):
            return piece
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def of_shown(self, traced: TracedToken) -> str:
        """The name of a token in the text: its part of it."""
        return f"token_id:{traced.token}" if self._as_ids else traced.text

    def bytes_of(self, token: int) -> list[int]:
        """The token's bytes, which of several tokens make up a character."""
        piece = self._detokenizers.piece(token)
        return list(piece.encode() if isinstance(piece, str) else piece)

    def is_hidden(self, traced: TracedToken) -> bool:
        """Whether the token is no text."""
        return not traced.text and (not traced.is_text or traced.token in self._detokenizers.special_ids)


class LogprobsForm(Protocol):
    """Makes the `logprobs` of one choice, piece by piece."""

    def render(self, tokens: Sequence[TracedToken]) -> dict[str, Any]:
        """Those of the next tokens."""


class ChatLogprobs:
    """The form of chat completions."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def render(self, tokens: Sequence[TracedToken]) -> dict[str, Any]:
        """Those of the next tokens."""
        return {"content": [_encoded(self._entry(traced)) for traced in tokens]}

    def _entry(self, traced: TracedToken) -> dict[str, Any]:
        names, row = self._names, row_at(traced.place)
        shown = names.of(traced.token) if names.is_hidden(traced) else names.of_shown(traced)
        top = [
            {
                "token": shown if token == traced.token and shown else names.of(token),
                "logprob": logprob,
                "bytes": names.bytes_of(token),
            }
            for token, logprob in row.top
        ]
        return {
            "token": shown,
            "logprob": row.logprob,
            "bytes": names.bytes_of(traced.token),
            "top_logprobs": top,
        }


class CompletionLogprobs:
    """The form of completions.

    Args:
        names: how tokens are called.
        num_top: how many of the likeliest tokens were asked for.
        offset: where in the text its tokens begin.
    """

    def __init__(self, names: TokenNames, num_top: int, offset: int = 0) -> None:
        self._names = names
        self._num_top = num_top
        self._offset = offset

    def render(self, tokens: Sequence[TracedToken]) -> dict[str, Any]:
        """Those of the next tokens."""
        shown = [self._names.of_shown(traced) for traced in tokens]
        offsets: list[int] = []
        for traced in tokens:
            offsets.append(self._offset)
            self._offset += len(traced.text)
        rows = [row_at(traced.place) for traced in tokens]
        tops = [self._top(*known) for known in zip(tokens, shown, rows, strict=True)]
        return {
            "tokens": shown,
            "token_logprobs": [row.logprob for row in rows],
            "top_logprobs": [None if top is None else _encoded(top) for top in tops],
            "text_offset": offsets,
        }

    def _top(self, chosen: TracedToken, shown: str, row: Row) -> dict[str, float] | None:
        """The likeliest tokens and the one that is there; None if nothing comes before it."""
        if row.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in row.top[: self._num_top]:
            # Of several tokens with one name the likeliest counts.
            found.setdefault(shown if token == chosen.token else self._names.of(token), logprob)
        found.setdefault(shown, row.logprob)
        return found


def prompt_entries(
    prompt: Sequence[int], prompt_logprobs: Logprobs, num_top: int, names: TokenNames
) -> list[orjson.Fragment | None]:
    """`prompt_logprobs` of an answer: for each token but the first, what was likely, by token id."""
    entries: list[orjson.Fragment | None] = [None]
    for at, token in enumerate(prompt[1:]):
        row = row_at(Place(prompt_logprobs, at))
        ranked: list[tuple[int, float, int | None]] = [
            (top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(row.top[:num_top], 1)
        ]
        if token not in {top_id for top_id, _, _ in ranked}:
            assert row.logprob is not None
            # Its rank is not known: only that it is lower than those.
            ranked.insert(0, (token, row.logprob, None))
        entry = {
            str(top_id): {"logprob": logprob, "rank": rank, "decoded_token": names.of(top_id)}
            for top_id, logprob, rank in ranked
        }
        entries.append(_encoded(entry))
    return entries


def _encoded(told: dict[str, Any]) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps(told))
