"""Everything that changes logits before a token is chosen from them, but for temperature and filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from streamserve.engine.step import EMPTY, Int32Array
from streamserve.worker.link import DeviceLink
from streamserve.worker.logit_masks import LogitMasks
from streamserve.worker.penalties import OccurrenceCounter, Penalties
from streamserve.worker.sampling_columns import SamplingColumns, TokenLists
from streamserve.worker.token_pool import TokenPool


class _Rule(Protocol):
    """Bound to the rows of a step."""

    def apply(self, logits: torch.Tensor, positions: Int32Array) -> None: ...


class LogitBias:
    """Shifts single logits.

    Args:
        lists: row of the logits → what its request says about single tokens.
        vocab_size: width of the logits.
        link: to where they are.
    """

    def __init__(self, lists: Mapping[int, TokenLists], vocab_size: int, link: DeviceLink) -> None:
        index = np.concatenate([one.bias_ids + row * vocab_size for row, one in lists.items()])
        biases = np.concatenate([one.biases for one in lists.values()])
        self._index, self._biases = link.upload(index), link.upload(biases)

    def apply(self, logits: torch.Tensor, positions: Int32Array) -> None:
        """Shifts float32[k, vocab_size] in place."""
        logits.view(-1).index_add_(0, self._index, self._biases)


class LogitRules:
    """Masks, then logit bias, then penalties.

    What they need of a set of slots is worked out once and kept while the same slots sample under the same
    settings, as they do in steady decode.

    Args:
        columns: the slots' settings.
        pool: known tokens of every slot.
        vocab_size: width of the logits.
    """

    def __init__(self, columns: SamplingColumns, pool: TokenPool, vocab_size: int) -> None:
        self._columns, self._pool, self._vocab_size = columns, pool, vocab_size
        self._counter = OccurrenceCounter(pool.device)
        self._slots: Int32Array = EMPTY
        self._version = columns.version
        self._rules: list[_Rule] = []

    def apply(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        """Changes `logits` in place.

        Args:
            logits: float32[k, vocab_size].
            slots: int32[k], whose settings apply to each row.
            positions: int32[k], known tokens of each row.
        """
        if self._version != self._columns.version or not np.array_equal(slots, self._slots):
            self._rules = self._bind(slots)
            self._slots, self._version = slots.copy(), self._columns.version
        for rule in self._rules:
            rule.apply(logits, positions)

    def _bind(self, slots: Int32Array) -> list[_Rule]:
        columns = self._columns
        lists = {
            row: columns.token_lists[slot]
            for row, slot in enumerate(slots.tolist())
            if slot in columns.token_lists
        }
        rules: list[_Rule] = []
        if lists or columns.stops_from[slots].any():
            rules.append(LogitMasks(columns, lists, slots, self._pool, self._vocab_size))
        if any(len(one.bias_ids) for one in lists.values()):
            rules.append(LogitBias(lists, self._vocab_size, self._pool.link))
        if columns.has_penalties[slots].any():
            rules.append(Penalties(columns, slots, self._pool, self._counter))
        return rules
