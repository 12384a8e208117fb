"""Text of a given number of tokens, from whole words whose tokens add up."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping

WORDS = tuple(
    """about above after again air all also animal another answer any apple around ask away back because
    bed before begin between big bird blue boat book both box boy bread bring build call came can car
    carry change children city close cold come country cut day different door down draw drink each early
    earth eat end enough even every eye face family far farm father feet few field find fire first fish
    follow food form found four friend from garden gave girl give good great green ground group grow
    half hand hard head hear help here high hold home horse house hundred idea keep kind know land large
    last late learn leave left letter life light line list little live long look made make man many map
    mean measure men might mile milk miss money moon more morning most mother mountain move much music
    must name near need never new next night north nothing now number old once one open order other over
    own page paper part people picture place plan plant play point question quick rain reach read ready
    real right river road rock room round run said same say school sea second see seem sentence set
    several she short should show side simple small song soon sound south stand star start state step
    still stop story street strong study such sun sure table take talk teach tell their them there thing
    think three through time today together took town travel tree true turn two under until very voice
    walk want warm watch water way week well went west wheel where which white whole why wind winter
    with wood word work world would write year young""".split()  # noqa: SIM905
)
# What one of these words costs where nobody can say.
USUAL_COST = 1
Costs = Mapping[str, int]


def costs_by(count: Callable[[str], int]) -> Costs:
    """The costs of all words, by what counts the tokens of a text."""
    return {word: count(f" {word}") for word in WORDS}


class TextMaker:
    """Makes up text: tokenizers cut it at spaces first, so the tokens of its words add up.

    Args:
        costs: tokens of each word to choose from, with a space before it.
    """

    def __init__(self, costs: Costs) -> None:
        ordered = sorted((max(cost, 1), f" {word}") for word, cost in costs.items())
        self._costs = [cost for cost, _ in ordered]
        self._words = [word for _, word in ordered]

    def make(self, num_tokens: int, rng: random.Random) -> str:
        """Text of `num_tokens` tokens; of a few less where no word is short enough for the rest."""
        parts: list[str] = []
        left = num_tokens
        while fitting := bisect_right(self._costs, left):
            chosen = rng.randrange(fitting)
            parts.append(self._words[chosen])
            left -= self._costs[chosen]
        return "".join(parts)
