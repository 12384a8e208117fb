"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamserve.errors import InvalidRequest

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
# Below this, dividing logits by the temperature only loses precision: the choice is the argmax.
GREEDY_BELOW = 1e-2


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Some of a vocabulary's tokens, a bit each: a request may name nearly all, and many requests may wait.

    Attributes:
        bits: token `n` is in the set if bit `n % 8` of byte `n // 8` is 1.
    """

    bits: bytes

    @classmethod
    def of(cls, ids: npt.ArrayLike) -> TokenSet:
        """The set of `ids`, none of them negative."""
        array = np.asarray(ids, dtype=np.int64)
        flags = np.zeros(array.max(initial=-1) + 1, dtype=bool)
        flags[array] = True
        return cls(np.packbits(flags, bitorder="little").tobytes())

    def ids(self) -> npt.NDArray[np.int64]:
        """Its tokens, int64[n], in order."""
        flags = np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8), bitorder="little")
        return np.flatnonzero(flags)

    def __bool__(self) -> bool:
        return bool(self.bits)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request, valid by construction.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        min_tokens: end-of-sequence and stop ids are not sampled before this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it. At most 2.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: drop tokens below this share of the likeliest one's probability, in [0, 1].
        seed: int64 key of the counter-based randomness (seed, position).
        ignore_eos: go on after the model's end-of-sequence token.
        stop_token_ids: further token ids that end the request.
        presence_penalty: taken off the logit of every token that the answer has, in [-2, 2].
        frequency_penalty: taken off it as often as the answer has the token, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or answer
            have; above 0, 1 is off.
        logit_bias: (token id, what is added to its logit), at most 100 either way.
        bad_words: token id sequences that must not come about.
        allowed_token_ids: nothing else is sampled; None allows all.
        logprobs: how many of the likeliest tokens are reported at each position, with their log probabilities
            before any of the above, besides the sampled one; None reports nothing, 0 the sampled one alone.
        prompt_logprobs: the same for each token of the prompt but the first.

    Raises:
        InvalidRequest: a value is out of range; `param` names it.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: TokenSet | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            "must be between 0 and max_tokens",
        )
        _check(
            math.isfinite(self.temperature) and 0.0 <= self.temperature <= 2.0,
            "temperature",
            "must be between 0 and 2",
        )
        _check(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
        _check(0 <= self.top_k < 2**31, "top_k", "must be 0 (off) or a positive 32-bit integer")
        _check(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        _check(SEED_MIN <= self.seed <= SEED_MAX, "seed", "must be a 64-bit signed integer")
        for param in ("presence_penalty", "frequency_penalty"):
            _check(-2.0 <= getattr(self, param) <= 2.0, param, "must be between -2 and 2")
        _check(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0,
            "repetition_penalty",
            "must be above 0",
        )
        _check(
            all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias),
            "logit_bias",
            "must have values between -100 and 100",
        )
        _check(all(self.bad_words), "bad_words", "must not have an empty word")
        allowed = self.allowed_token_ids
        _check(allowed is None or bool(allowed), "allowed_token_ids", "must allow at least one token")
        for param in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, param)
            _check(asked is None or asked >= 0, param, "must not be negative")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken without any randomness."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on which tokens are there already."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


def _check(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {rule}.", param)
