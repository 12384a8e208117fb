"""The sampling settings of all slots as columns, on the host, so that no step asks the device what to do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamserve.sampling import SamplingParams
from streamserve.worker.gumbel import seed_key


class SamplingColumns:
    """One row a slot.

    Attributes:
        is_greedy: bool[s], take the likeliest token.
        temperature: float32[s].
        top_p: float32[s], 1 is off.
        top_k: int64[s], `vocab_size` is off.
        min_p: float32[s], 0 is off.
        seed_keys: uint32[s, 2], from `gumbel.seed_key`.
        stops_from: int64[s], known tokens from which on the slot may sample an id that ends it.
        stop_ids: int64[s, w], those ids; short rows repeat their first one. w grows with need.

    Args:
        max_num_seqs: slots.
        vocab_size: stop ids outside the vocabulary are dropped: they can never be sampled.
        eos_token_ids: held back by `min_tokens` along with a request's own stop ids. This goes for
            `ignore_eos` too: a request that asks for a least length wants text, not markers, up to there.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.is_greedy = np.ones(max_num_seqs, dtype=bool)
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.full(max_num_seqs, vocab_size, dtype=np.int64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed_keys = np.zeros((max_num_seqs, 2), dtype=np.uint32)
        self.stops_from = np.zeros(max_num_seqs, dtype=np.int64)
        self.stop_ids: npt.NDArray[np.int64] = np.zeros((max_num_seqs, 1), dtype=np.int64)

    def put(self, slot: int, params: SamplingParams, num_prompt: int) -> None:
        """Writes the row of a request that takes `slot`."""
        self.is_greedy[slot] = params.is_greedy
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self.min_p[slot] = params.min_p
        self.seed_keys[slot] = seed_key(params.seed)
        self.stops_from[slot] = 0
        if params.min_tokens:
            self._hold_back_stops(slot, params, num_prompt + params.min_tokens)

    def _hold_back_stops(self, slot: int, params: SamplingParams, until: int) -> None:
        ids = [i for i in (*self._eos_token_ids, *params.stop_token_ids) if 0 <= i < self._vocab_size]
        if not ids:
            return
        self.stops_from[slot] = until
        if len(ids) > self.stop_ids.shape[1]:
            added = len(ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, added)), mode="edge")
        self.stop_ids[slot, : len(ids)] = ids
        self.stop_ids[slot, len(ids) :] = ids[0]
