"""What is asked: prompts of several kinds, in a mix."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from streamserve.bench.datasets import sharegpt_lengths
from streamserve.bench.words import TextMaker

# For what a chat template adds.
_TEMPLATE_TOKENS = 64
# Documents are made of pages that are made once.
_NUM_PAGES, _PAGE_TOKENS, _TITLE_TOKENS = 64, 256, 16
_QUESTION_TOKENS = (8, 48)
_ANSWER_TOKENS = (32, 256)


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    Attributes:
        kind: of the mix.
        messages: of the chat.
        max_tokens: of the answer.
    """

    kind: str
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int

    def body(self, model: str, stops_at_eos: bool) -> dict[str, Any]:
        """The body of a request to stream the answer, and to say its tokens at the end."""
        body: dict[str, Any] = {
            "model": model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body if stops_at_eos else body | {"ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens.

    Attributes:
        shared_prefix: that all prompts of this kind begin with.
        document: of a long document.
        most_output: of an answer, whatever the kind.
        context: that the model can take; longer prompts are made shorter.
    """

    shared_prefix: int = 900
    document: int = 8000
    most_output: int = 1024
    context: int = 1 << 20

    def within(self, context: int | None) -> Lengths:
        """The same for a model with that context; None: nobody knows."""
        return self if context is None else replace(self, context=context)


class Mix:
    """Draws questions.

    Args:
        weights: of each kind.
        lengths: how long they are.
        maker: of the text.
        seed: of what all prompts share.
    """

    def __init__(self, weights: Mapping[str, float], lengths: Lengths, maker: TextMaker, seed: int) -> None:
        self._kinds = list(weights)
        self._weights = list(weights.values())
        self._lengths = lengths
        self._maker = maker
        rng = random.Random(seed)
        self._shared = maker.make(self._fit(lengths.shared_prefix, 0), rng)
        self._pages = [maker.make(_PAGE_TOKENS, rng) for _ in range(_NUM_PAGES)]

    def draw(self, rng: random.Random) -> Question:
        """The next question of a user."""
        kind = rng.choices(self._kinds, self._weights)[0]
        return _KINDS[kind](self, kind, rng)

    def _sharegpt(self, kind: str, rng: random.Random) -> Question:
        prompt, output = sharegpt_lengths(rng)
        output = self._cut(output)
        return _question(kind, self._maker.make(self._fit(prompt, output), rng), output)

    def _shared_prefix(self, kind: str, rng: random.Random) -> Question:
        question = self._maker.make(rng.randint(*_QUESTION_TOKENS), rng)
        return _question(kind, question, self._cut(rng.randint(*_ANSWER_TOKENS)), self._shared)

    def _document(self, kind: str, rng: random.Random) -> Question:
        output = self._cut(rng.randint(*_ANSWER_TOKENS))
        # Word by word it would take milliseconds, for which the client would read no stream.
        num_pages, rest = divmod(self._fit(self._lengths.document, output), _PAGE_TOKENS)
        # What is its own comes first, and is never nothing: nobody has read the same document before.
        if num_pages and rest < _TITLE_TOKENS:
            num_pages, rest = num_pages - 1, rest + _PAGE_TOKENS
        pages = "".join(rng.choices(self._pages, k=num_pages))
        return _question(kind, self._maker.make(rest, rng) + pages, output)

    def _cut(self, output: int) -> int:
        return max(min(output, self._lengths.most_output, self._lengths.context // 4), 1)

    def _fit(self, prompt: int, output: int) -> int:
        reserved = output or max(_QUESTION_TOKENS) + max(_ANSWER_TOKENS)
        return max(min(prompt, self._lengths.context - reserved - _TEMPLATE_TOKENS), 1)


def _question(kind: str, text: str, max_tokens: int, system: str = "") -> Question:
    messages = ({"role": "system", "content": system},) if system else ()
    return Question(kind, (*messages, {"role": "user", "content": text}), max_tokens)


_KINDS: dict[str, Callable[[Mix, str, random.Random], Question]] = {
    "sharegpt": Mix._sharegpt,
    "shared-prefix": Mix._shared_prefix,
    "document": Mix._document,
}
KINDS = tuple(_KINDS)


def parse_mix(text: str) -> dict[str, float]:
    """Weights by kind, from `KIND[:WEIGHT],…`.

    Raises:
        ValueError: a kind does not exist, or a weight is no number of at least 0; says which.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        kind, colon, weight = part.strip().partition(":")
        if kind not in KINDS:
            raise ValueError(f"there is no {kind!r}; choose of {', '.join(KINDS)}")
        try:
            weights[kind] = float(weight) if colon else 1.0
        except ValueError:
            raise ValueError(f"{part!r} has to be of the form KIND:WEIGHT") from None
        if not 0.0 <= weights[kind] < float("inf"):
            raise ValueError(f"the weight of {kind} has to be at least 0")
    if not any(weights.values()):
        raise ValueError("one of the weights has to be more than 0")
    return weights
