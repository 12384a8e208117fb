"""Repetition, frequency and presence penalties, worked out from the known tokens themselves.

No counts are kept from step to step. The token pool has every known token on the device, and a penalty only
touches logits of tokens that are in it, so a step costs one gather over the known tokens of the rows that
have penalties: far less than attention spent on the same tokens, and less than a pass over a count for every
token of the vocabulary would. What a request is given depends on its tokens alone, so it is the same after
preemption, in a resumed stream, and for several tokens a step.
"""

from __future__ import annotations

import numpy as np
import torch

from streamserve.engine.step import Int32Array
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.token_pool import Int64Array, TokenPool


class OccurrenceCounter:
    """Counts equal numbers in an array without a pass over all numbers there could be.

    Args:
        device: where the arrays are.
    """

    def __init__(self, device: torch.device) -> None:
        # All zero between calls.
        self._counts = torch.zeros(0, device=device)

    def count(self, index: torch.Tensor, limit: int) -> torch.Tensor:
        """How often each element of `index` occurs in it, float32[n].

        Args:
            index: int64[n], from 0 to `limit`, exclusive.
            limit: the counter keeps this many floats from then on.
        """
        if len(self._counts) < limit:
            self._counts = torch.zeros(limit, device=index.device)
        self._counts.index_add_(0, index, torch.ones(len(index), device=index.device))
        counts = self._counts.index_select(0, index)
        self._counts.index_fill_(0, index, 0.0)
        return counts


class Penalties:
    """The penalties of one set of slots: repetition over prompt and output, the others over the output.

    Args:
        columns: the slots' settings.
        slots: int32[k], the slot of every row of logits.
        pool: known tokens of every slot.
        counter: scratch for frequencies.
    """

    def __init__(
        self, columns: SamplingColumns, slots: Int32Array, pool: TokenPool, counter: OccurrenceCounter
    ) -> None:
        self._pool, self._counter = pool, counter
        repetition, presence, frequency = (
            column[slots] for column in (columns.repetition, columns.presence, columns.frequency)
        )
        self._repeating = np.flatnonzero(repetition != 1.0)
        self._counted = np.flatnonzero((presence != 0.0) | (frequency != 0.0))
        self._repeating_slots, self._counted_slots = slots[self._repeating], slots[self._counted]
        self._num_prompt: Int64Array = columns.num_prompt[self._counted_slots]
        self._repeating_on_device = pool.link.upload(self._repeating)
        self._counted_on_device = pool.link.upload(self._counted)
        self._repetition = pool.link.upload(repetition[self._repeating])
        self._presence = pool.link.upload(presence[self._counted])
        self._frequency = pool.link.upload(frequency[self._counted]) if frequency.any() else None

    def apply(self, logits: torch.Tensor, positions: Int32Array) -> None:
        """Penalises float32[k, vocab_size] in place; positions int32[k], known tokens of each row."""
        if len(self._repeating):
            self._penalise_repetition(logits, positions[self._repeating])
        if len(self._counted):
            self._penalise_output(logits, positions[self._counted])

    def _penalise_repetition(self, logits: torch.Tensor, ends: Int32Array) -> None:
        begins = np.zeros(len(ends), dtype=np.int64)
        tokens, owners = self._pool.spans(self._repeating_slots, begins, ends)
        flat = logits.view(-1)
        index = self._repeating_on_device.index_select(0, owners) * logits.shape[1] + tokens
        values, factors = flat.index_select(0, index), self._repetition.index_select(0, owners)
        penalised = torch.where(values > 0, values / factors, values * factors)
        # A token that comes several times is written as often, with the same value.
        flat.index_copy_(0, index, penalised)

    def _penalise_output(self, logits: torch.Tensor, ends: Int32Array) -> None:
        tokens, owners = self._pool.spans(self._counted_slots, self._num_prompt, ends)
        flat = logits.view(-1)
        index = self._counted_on_device.index_select(0, owners) * logits.shape[1] + tokens
        values = flat.index_select(0, index)
        if self._frequency is not None:
            counted = owners * logits.shape[1] + tokens
            counts = self._counter.count(counted, len(self._counted) * logits.shape[1])
            values.sub_(counts.mul_(self._frequency.index_select(0, owners)))
        flat.index_copy_(0, index, values.sub_(self._presence.index_select(0, owners)))
