"""The sampling settings of all slots as columns, on the host, so that no step asks the device what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamserve.sampling import SamplingParams, TokenSet
from streamserve.worker.gumbel import seed_key

# Keeps a logit times or over the repetition penalty within float32.
_LEAST_REPETITION, _MOST_REPETITION = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class TokenLists:
    """What a request says about single tokens: of any length, so in no column. Most requests have none.

    Attributes:
        allowed_ids: int64[n], nothing else is sampled; None allows all.
        bias_ids: int64[n], tokens whose logits are shifted.
        biases: float32[n], by how much.
        bad_words: sequences that must not come about; each ends with an id of the vocabulary.
    """

    allowed_ids: npt.NDArray[np.int64] | None
    bias_ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    bad_words: tuple[tuple[int, ...], ...]


class SamplingColumns:
    """One row a slot.

    Token ids outside the vocabulary are dropped from every list: they can never be sampled.

    Attributes:
        is_plain: bool[s], the settings from `is_greedy` to `seed_keys` are all there is.
        is_greedy: bool[s], take the likeliest token.
        temperature: float32[s].
        top_p: float32[s], 1 is off.
        top_k: int64[s], `vocab_size` is off.
        min_p: float32[s], 0 is off.
        seed_keys: uint32[s, 2], from `gumbel.seed_key`.
        has_rules: bool[s], logits are changed before a token is chosen from them (`logit_rules`).
        stops_from: int64[s], known tokens from which on the slot may sample an id that ends it.
        stop_ids: int64[s, w], those ids; short rows repeat their first one. w grows with need.
        has_penalties: bool[s], any of the next three is on.
        presence, frequency: float32[s], 0 is off.
        repetition: float32[s], 1 is off.
        num_prompt: int64[s], known tokens that were there before the first was sampled.
        wants_logprobs: bool[s], sampled tokens are reported with log probabilities.
        num_top: int64[s], how many of the likeliest tokens with each; at most `vocab_size`.
        token_lists: of the slots that have any.
        version: changes whenever the row of a slot that is not plain does.
        eos_token_ids: end-of-sequence ids of the vocabulary.

    Args:
        max_num_seqs: slots.
        vocab_size: token ids run from 0 to this, exclusive.
        eos_token_ids: held back by `min_tokens` along with a request's own stop ids. This goes for
            `ignore_eos` too: a request that asks for a least length wants text, not markers, up to there.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self.eos_token_ids = tuple(self._within(eos_token_ids))
        self.is_plain = np.ones(max_num_seqs, dtype=bool)
        self.is_greedy = np.ones(max_num_seqs, dtype=bool)
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.full(max_num_seqs, vocab_size, dtype=np.int64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed_keys = np.zeros((max_num_seqs, 2), dtype=np.uint32)
        self.has_rules = np.zeros(max_num_seqs, dtype=bool)
        self.stops_from = np.zeros(max_num_seqs, dtype=np.int64)
        self.stop_ids: npt.NDArray[np.int64] = np.zeros((max_num_seqs, 1), dtype=np.int64)
        self.has_penalties = np.zeros(max_num_seqs, dtype=bool)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.presence = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition = np.ones(max_num_seqs, dtype=np.float32)
        self.wants_logprobs = np.zeros(max_num_seqs, dtype=bool)
        self.num_top = np.zeros(max_num_seqs, dtype=np.int64)
        self.token_lists: dict[int, TokenLists] = {}
        self.version = 0

    def put(self, slot: int, params: SamplingParams, num_prompt: int) -> None:
        """Writes the row of a request that takes `slot`."""
        self.is_greedy[slot] = params.is_greedy
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self.min_p[slot] = params.min_p
        self.seed_keys[slot] = seed_key(params.seed)
        has_rules = _has_rules(params)
        is_plain = not has_rules and params.logprobs is None
        if not (is_plain and self.is_plain[slot]):
            self.is_plain[slot], self.has_rules[slot] = is_plain, has_rules
            self._put_rest(slot, params, num_prompt)

    def _put_rest(self, slot: int, params: SamplingParams, num_prompt: int) -> None:
        """What a plain row has at its defaults."""
        self.version += 1
        self.num_prompt[slot] = num_prompt
        self.stops_from[slot] = 0
        if params.min_tokens:
            self._hold_back_stops(slot, params, num_prompt + params.min_tokens)
        self.has_penalties[slot] = params.has_penalties
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = min(max(params.repetition_penalty, _LEAST_REPETITION), _MOST_REPETITION)
        self.wants_logprobs[slot] = params.logprobs is not None
        self.num_top[slot] = min(params.logprobs or 0, self._vocab_size)
        self.token_lists.pop(slot, None)
        if params.allowed_token_ids is not None or params.logit_bias or params.bad_words:
            self.token_lists[slot] = self._lists_of(params)

    def _hold_back_stops(self, slot: int, params: SamplingParams, until: int) -> None:
        ids = [*self.eos_token_ids, *self._within(params.stop_token_ids)]
        if not ids:
            return
        self.stops_from[slot] = until
        if len(ids) > self.stop_ids.shape[1]:
            added = len(ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, added)), mode="edge")
        self.stop_ids[slot, : len(ids)] = ids
        self.stop_ids[slot, len(ids) :] = ids[0]

    def _lists_of(self, params: SamplingParams) -> TokenLists:
        allowed = params.allowed_token_ids
        bias = [(i, bias) for i, bias in params.logit_bias if 0 <= i < self._vocab_size]
        return TokenLists(
            allowed_ids=None if allowed is None else self._allowed_within(allowed),
            bias_ids=np.array([i for i, _ in bias], dtype=np.int64),
            biases=np.array([by for _, by in bias], dtype=np.float32),
            bad_words=tuple(word for word in params.bad_words if 0 <= word[-1] < self._vocab_size),
        )

    def _allowed_within(self, allowed: TokenSet) -> npt.NDArray[np.int64]:
        ids = allowed.ids()
        return ids[ids < self._vocab_size]

    def _within(self, token_ids: Iterable[int]) -> list[int]:
        return [i for i in token_ids if 0 <= i < self._vocab_size]


def _has_rules(params: SamplingParams) -> bool:
    has_lists = params.logit_bias or params.bad_words or params.allowed_token_ids is not None
    return bool(has_lists or params.min_tokens or params.has_penalties)
