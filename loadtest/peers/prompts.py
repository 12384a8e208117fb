"""Prompts of an exact number of tokens, the same for every server."""

from __future__ import annotations

import random
from pathlib import Path

from loadtest.peers.models import CORPUS


class PromptMaker:
    """Makes up text from whole words, whose tokens add up: byte-level tokenizers cut text at spaces first.

    Args:
        folder: of the model whose tokens are counted.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        words = sorted({word.strip(".,;?").lower() for word in CORPUS.split()})
        costs = {f" {word}": self.count(f" {word}") for word in words if word.isalpha()}
        self._words = list(costs.items())
        self._short = [word for word, cost in costs.items() if cost == 1]
        self._most = max(costs.values())

    def count(self, text: str) -> int:
        """Tokens of `text`."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def make(self, num_tokens: int, seed: str) -> str:
        """Text of `num_tokens` tokens; another for each `seed`."""
        rng = random.Random(seed)
        parts: list[str] = []
        left = num_tokens
        while left >= self._most:
            word, cost = rng.choice(self._words)
            parts.append(word)
            left -= cost
        parts += rng.choices(self._short, k=left)
        return "".join(parts)

    def shared(self, num_tokens: int, seed: str) -> str:
        """What `prompts` of that seed begin with."""
        return self.make(num_tokens, f"{seed}/shared")

    def prompts(self, count: int, num_tokens: int, shared_tokens: int, seed: str) -> list[str]:
        """`count` prompts of `num_tokens` tokens that begin with the same `shared_tokens` ones."""
        shared = self.shared(shared_tokens, seed)
        own = num_tokens - shared_tokens
        return [shared + self.make(own, f"{seed}/{number}") for number in range(count)]
