"""Which tokens a request may not be given: allowed token ids, bad words, and no end before min_tokens.

What is masked is -inf from there on; no bias or penalty brings it back. When the masks of a request leave
nothing at all (its only allowed token is a bad word, say), its rules cannot be kept, and it is given the
end-of-sequence token, which ends most requests; on a model without one, the likeliest token.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from streamserve.engine.step import Int32Array
from streamserve.worker.link import DeviceLink
from streamserve.worker.sampling_columns import SamplingColumns, TokenLists
from streamserve.worker.token_pool import Int64Array, TokenPool


class AllowedIds:
    """Leaves nothing but the allowed ids of some rows.

    Args:
        allowed: row of the logits → int64[n], its ids.
        vocab_size: width of the logits.
        link: to where they are.
    """

    def __init__(self, allowed: dict[int, Int64Array], vocab_size: int, link: DeviceLink) -> None:
        self._rows = link.upload(np.array(list(allowed), dtype=np.int64))
        index = np.concatenate([ids + row * vocab_size for row, ids in allowed.items()])
        self._index = link.upload(index)

    def apply(self, logits: torch.Tensor) -> None:
        """Masks float32[k, vocab_size] in place."""
        flat = logits.view(-1)
        kept = flat.index_select(0, self._index)
        logits.index_fill_(0, self._rows, -torch.inf)
        flat.index_copy_(0, self._index, kept)


class BadWords:
    """Masks the last token of every bad word whose other tokens the request ends with right now.

    The beginnings of all words lie in one array, so a step costs their total length, however they are spread.

    Args:
        words: row of the logits → its words.
        slots: int32[k], the slot of every row.
        pool: known tokens of every slot.
        vocab_size: width of the logits.
    """

    def __init__(
        self,
        words: dict[int, tuple[tuple[int, ...], ...]],
        slots: Int32Array,
        pool: TokenPool,
        vocab_size: int,
    ) -> None:
        pairs = [(row, word) for row, row_words in words.items() for word in row_words]
        self._pool = pool
        self._rows = np.array([row for row, _ in pairs])
        self._begin_lens = np.array([len(word) - 1 for _, word in pairs])
        last_ids = np.array([word[-1] for _, word in pairs])
        # Of each token of each beginning: its word, the word's slot, and how far from the end it must stand.
        self._word = np.repeat(np.arange(len(pairs)), self._begin_lens)
        self._slot = slots[self._rows[self._word]]
        self._back = np.array([back for _, word in pairs for back in range(len(word) - 1, 0, -1)], np.int64)
        begins = [token for _, word in pairs for token in word[:-1]]
        self._begins = self._pool.link.upload(np.array(begins, dtype=np.int64))
        self._word_on_device = self._pool.link.upload(self._word)
        self._index = self._pool.link.upload(self._rows * vocab_size + last_ids)

    def apply(self, logits: torch.Tensor, positions: Int32Array) -> None:
        """Masks float32[k, vocab_size] in place; positions int32[k], known tokens of each row."""
        ends = positions[self._rows]
        has_room = self._pool.link.upload(self._begin_lens <= ends)
        places = np.maximum(ends[self._word] - self._back, 0)
        differs = (self._pool.at(self._slot, places) != self._begins).to(torch.float32)
        num_different = torch.zeros(len(self._rows), device=logits.device)
        num_different.index_add_(0, self._word_on_device, differs)
        is_hit = has_room.logical_and_(num_different == 0)
        bounds = torch.full_like(num_different, torch.inf).masked_fill_(is_hit, -torch.inf)
        # Words of a row may share their last token: whichever of them is hit wins.
        logits.view(-1).scatter_reduce_(0, self._index, bounds, "amin")


class MinTokens:
    """No end before `min_tokens`: masks the ids that would end a row too early.

    Args:
        rows: int64[r], rows of the logits that have a least length.
        until: int64[r], known tokens from which on each may end.
        stop_ids: int64[r, w].
        link: to where the logits are.
    """

    def __init__(self, rows: Int64Array, until: Int64Array, stop_ids: Int64Array, link: DeviceLink) -> None:
        self._rows, self._until, self._stop_ids, self._link = rows, until, stop_ids, link

    def apply(self, logits: torch.Tensor, positions: Int32Array) -> None:
        """Masks float32[k, vocab_size] in place; positions int32[k], known tokens of each row."""
        is_early = positions[self._rows] < self._until
        if is_early.any():
            index = self._rows[is_early, None] * logits.shape[1] + self._stop_ids[is_early]
            logits.view(-1).index_fill_(0, self._link.upload(index.ravel()), -torch.inf)


class Fallback:
    """Gives rows a token that the masks may leave without any.

    Args:
        candidates: row of the logits → int64[n], ids that may be left.
        eos_token_id: what such a row is given; None takes its likeliest token.
        vocab_size: width of the logits.
        link: to where they are.
    """

    def __init__(
        self,
        candidates: dict[int, Int64Array],
        eos_token_id: int | None,
        vocab_size: int,
        link: DeviceLink,
    ) -> None:
        self._eos_token_id = eos_token_id
        self._rows = link.upload(np.array(list(candidates), dtype=np.int64))
        index = np.concatenate([ids + row * vocab_size for row, ids in candidates.items()])
        owners = np.repeat(np.arange(len(candidates)), [len(ids) for ids in candidates.values()])
        self._index, self._owners = link.upload(index), link.upload(owners)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """int64[r], a token for each row, from logits that nothing has been masked in."""
        if self._eos_token_id is None:
            return logits.index_select(0, self._rows).argmax(-1)
        return torch.full_like(self._rows, self._eos_token_id)

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Unmasks the token of `choose` in rows where nothing else is left."""
        flat = logits.view(-1)
        left = torch.full(self._rows.shape, -torch.inf, device=logits.device)
        left.scatter_reduce_(0, self._owners, flat.index_select(0, self._index), "amax")
        index = self._rows * logits.shape[1] + token_ids
        flat.index_copy_(0, index, flat.index_select(0, index).masked_fill_(left == -torch.inf, 0.0))


class LogitMasks:
    """All masks of one set of slots, in order: allowed ids, bad words, min_tokens.

    Args:
        columns: the slots' settings.
        lists: row of the logits → what its request says about single tokens.
        slots: int32[k], the slot of every row.
        pool: known tokens of every slot.
        vocab_size: width of the logits.
    """

    def __init__(
        self,
        columns: SamplingColumns,
        lists: Mapping[int, TokenLists],
        slots: Int32Array,
        pool: TokenPool,
        vocab_size: int,
    ) -> None:
        allowed = {row: one.allowed_ids for row, one in lists.items() if one.allowed_ids is not None}
        words = {row: one.bad_words for row, one in lists.items() if one.bad_words}
        early_rows = np.flatnonzero(columns.stops_from[slots])
        early_slots = slots[early_rows]
        link = pool.link
        self._allowed = AllowedIds(allowed, vocab_size, link) if allowed else None
        self._bad_words = BadWords(words, slots, pool, vocab_size) if words else None
        self._min_tokens = None
        if len(early_rows):
            until, stop_ids = columns.stops_from[early_slots], columns.stop_ids[early_slots]
            self._min_tokens = MinTokens(early_rows, until, stop_ids, link)
        num_stop_ids: int = columns.stop_ids.shape[1]
        candidates = _rows_at_risk(lists, dict.fromkeys(early_rows.tolist(), num_stop_ids), vocab_size)
        self._fallback = None
        if candidates:
            eos = columns.eos_token_ids
            self._fallback = Fallback(candidates, eos[0] if eos else None, vocab_size, link)

    def apply(self, logits: torch.Tensor, positions: Int32Array) -> None:
        """Masks float32[k, vocab_size] in place; positions int32[k], known tokens of each row."""
        instead = None if self._fallback is None else self._fallback.choose(logits)
        if self._allowed is not None:
            self._allowed.apply(logits)
        if self._bad_words is not None:
            self._bad_words.apply(logits, positions)
        if self._min_tokens is not None:
            self._min_tokens.apply(logits, positions)
        if self._fallback is not None:
            self._fallback.apply(logits, instead)


def _rows_at_risk(
    lists: Mapping[int, TokenLists], num_stop_ids: Mapping[int, int], vocab_size: int
) -> dict[int, Int64Array]:
    """Rows whose masks may leave nothing, with the ids that they may leave.

    They are those with allowed ids, and those with as many single masks as there are tokens.
    """
    candidates = {}
    for row in sorted(lists.keys() | num_stop_ids.keys()):
        own = lists.get(row)
        num_masks = num_stop_ids.get(row, 0) + (0 if own is None else len(own.bad_words))
        if own is not None and own.allowed_ids is not None:
            candidates[row] = own.allowed_ids
        elif num_masks >= vocab_size:
            candidates[row] = np.arange(vocab_size)
    return candidates
