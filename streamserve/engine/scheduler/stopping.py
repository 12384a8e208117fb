"""StopRules: when a request has its last token, decided for a whole step at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamserve.engine.scheduler.states import Request
from streamserve.messages import Finish

# A position that no token reaches.
BEYOND = np.iinfo(np.int64).max


class StopRules:
    """End-of-sequence, stop ids and length limits of the running requests, a row a slot.

    `SamplingParams.min_tokens` is a position here: a stop token before it does not end the request (nor does
    the worker sample one there).

    Args:
        max_num_seqs: slots.
        eos_token_ids: tokens that end any request which does not ignore them.

    Attributes:
        limit: int64[max_num_seqs], tokens that each may grow to, prompt included.
    """

    def __init__(self, max_num_seqs: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self.limit = np.full(max_num_seqs, BEYOND, dtype=np.int64)
        self._eos_from = np.full(max_num_seqs, BEYOND, dtype=np.int64)
        self._stops_from = np.full(max_num_seqs, BEYOND, dtype=np.int64)
        self._stop_ids: dict[int, frozenset[int]] = {}

    def set(self, slot: int, request: Request, limit: int) -> None:
        """`request` now runs in `slot` and may grow to `limit` tokens, prompt included."""
        params = request.params
        earliest = request.num_prompt + params.min_tokens
        self.limit[slot] = limit
        self._eos_from[slot] = BEYOND if params.ignore_eos else earliest
        if params.stop_token_ids:
            self._stops_from[slot] = earliest
            self._stop_ids[slot] = frozenset(params.stop_token_ids)

    def clear(self, slot: int) -> None:
        """Nothing runs in `slot` any more."""
        self._stops_from[slot] = BEYOND
        self._stop_ids.pop(slot, None)

    def judge(
        self,
        slots: npt.NDArray[np.intp],
        positions: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.uint8]:
        """A `Finish` code for each new token. Hot: all rows at once, only those with stop ids one by one.

        Args:
            slots: intp[n], where the requests run.
            positions: int64[n], the place of the new token in its request.
            token_ids: int32[n], the new token.
        """
        finish = np.where(positions + 1 >= self.limit[slots], np.uint8(Finish.LENGTH), np.uint8(Finish.NONE))
        for eos in self._eos_token_ids:
            is_eos = token_ids == eos
            if is_eos.any():
                finish[is_eos & (positions >= self._eos_from[slots])] = Finish.STOP
        if self._stop_ids:
            for row in np.flatnonzero(positions >= self._stops_from[slots]).tolist():
                if int(token_ids[row]) in self._stop_ids[int(slots[row])]:
                    finish[row] = Finish.STOP
        return finish
