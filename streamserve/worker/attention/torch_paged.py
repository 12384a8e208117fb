"""Paged attention in plain torch: right on any device, and what other backends are measured against.

Decode rows are gathered from the cache in groups of like length and attended in one call each, the query
heads of a KV head standing in for the query length. A prefill chunk is attended by itself. One that begins
the request needs no cache and no mask. One that goes on from earlier tokens is cut into tiles of queries
whose scores and mask stay small however long the context is. Prefill is computed in whatever format the
processor is fastest in (`attention_dtype`), whatever the cache keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from streamserve.worker.attention.base import AttentionBackend, GraphSupport
from streamserve.worker.attention.grouping import group_rows
from streamserve.worker.batch import InputBatch, StepInputs
from streamserve.worker.device import attention_dtype
from streamserve.worker.graphs.descriptor import BatchDescriptor
from streamserve.worker.kv_cache import KVCache

# Bytes of K gathered for one group of decode rows: small enough that SDPA finds them in the CPU's cache.
_GROUP_BYTES = 2 << 20
# Elements of a prefill tile's mask, queries by keys.
_TILE_ELEMENTS = 2 << 20
_MAX_TILE, _MIN_TILE = 256, 16


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows attended together.

    Attributes:
        rows: int64[g], their rows in the flat arrays; None is every row of the step.
        blocks: int64[g * b], their block tables one after the other, padded with any block.
        num_rows: g.
        context_len: keys that each row looks at.
        mask: [g, 1, 1, context_len], 0 or -inf; None when no row is shorter than that.
    """

    rows: torch.Tensor | None
    blocks: torch.Tensor
    num_rows: int
    context_len: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _PrefillTile:
    """Queries [start, end) of a chunk, which see the first `num_keys` keys of their request under `mask`."""

    start: int
    end: int
    num_keys: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _PrefillChunk:
    """Several tokens of one request.

    Attributes:
        start, end: its rows in the flat arrays.
        blocks: int64[b], its block table; None when the request begins with this chunk.
        tiles: how its queries are cut; empty when the request begins with this chunk.
    """

    start: int
    end: int
    blocks: torch.Tensor | None
    tiles: list[_PrefillTile]


@dataclass(frozen=True, slots=True)
class _Metadata:
    slot_mapping: torch.Tensor
    groups: list[_DecodeGroup]
    chunks: list[_PrefillChunk]


class _Gathered:
    """Room for the K or V of some blocks, written anew by each gather: memory fresh from the system is slow.

    Args:
        shape: of a block.
        dtype, device: of the cache.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._room = torch.empty((0, *shape), dtype=dtype, device=device)

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """`cache[blocks]` as [len(blocks) * block_size, num_kv_heads, head_dim], until the next gather."""
        count = len(blocks)
        if count > len(self._room):
            self._room = self._room.new_empty((max(count, 2 * len(self._room)), *self._room.shape[1:]))
        room = self._room[:count]
        torch.index_select(cache, 0, blocks, out=room)
        return room.flatten(0, 1)


class TorchPagedAttention(AttentionBackend):
    """Gathers keys and values by block table and calls scaled_dot_product_attention.

    Args:
        cache: the paged KV cache.
    """

    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        _, self._block_size, self._num_kv_heads, self._head_dim = cache.keys[0].shape
        self._dtype, self._device = cache.keys[0].dtype, cache.keys[0].device
        self._flat_keys = [keys.flatten(0, 1) for keys in cache.keys]
        self._flat_values = [values.flatten(0, 1) for values in cache.values]
        self._keys, self._values = (
            _Gathered(cache.keys[0].shape[1:], self._dtype, self._device) for _ in range(2)
        )
        self._prefill_dtype = attention_dtype(self._dtype, self._device)
        self._wide_mask = torch.empty((0, 0), dtype=self._prefill_dtype, device=self._device)
        row_bytes = self._num_kv_heads * self._head_dim * self._dtype.itemsize
        self._group_tokens = max(1, _GROUP_BYTES // row_bytes)

    @staticmethod
    def supports_block_size(block_size: int) -> bool:
        """Any."""
        return block_size >= 1

    def bind(self, batch: InputBatch) -> None:
        """See `AttentionBackend.bind`."""
        self._link = batch.link

    def build(
        self, batch: InputBatch, step: StepInputs, *, padded: BatchDescriptor | None = None
    ) -> _Metadata:
        """Groups the decode rows and cuts the prefill chunks of `step`, which is never padded here."""
        single = step.query_lens == 1
        if single.all():
            rows = None
            groups = self._decode_groups(batch, step.slots, step.context_lens, rows)
            return _Metadata(step.slot_mapping, groups, [])
        groups = []
        if single.any():
            rows = step.query_offsets[:-1][single]
            groups = self._decode_groups(batch, step.slots[single], step.context_lens[single], rows)
        return _Metadata(step.slot_mapping, groups, self._prefill_chunks(batch, step, ~single))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        layer: int,
        metadata: Any,
    ) -> None:
        """See `AttentionBackend.forward`. Hot: once a layer and step."""
        if self._dtype == torch.float16:
            # Float16 overflows. Padding rows and reused blocks still hold what earlier requests left in them;
            # attention weighs it with 0, and 0 times infinity is not 0.
            k, v = k.nan_to_num(), v.nan_to_num()
        self._flat_keys[layer].index_copy_(0, metadata.slot_mapping, k)
        self._flat_values[layer].index_copy_(0, metadata.slot_mapping, v)
        for group in metadata.groups:
            self._decode(group, q, out, layer)
        for chunk in metadata.chunks:
            rows = slice(chunk.start, chunk.end)
            if chunk.blocks is None:
                self._begin(q[rows], k[rows], v[rows], out[rows])
            else:
                self._go_on(chunk, q[rows], out[rows], layer)

    def _decode_groups(
        self,
        batch: InputBatch,
        slots: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64] | None,
    ) -> list[_DecodeGroup]:
        if len(slots) == 0:
            return []
        groups = []
        for group in group_rows(context_lens, self._group_tokens):
            lens, group_slots, group_rows_ = context_lens, slots, rows
            if group.rows is not None:
                lens, group_slots = context_lens[group.rows], slots[group.rows]
                group_rows_ = group.rows if rows is None else rows[group.rows]
            num_blocks = -(-group.context_len // self._block_size)
            blocks = batch.block_table[group_slots, :num_blocks].astype(np.int64).ravel()
            groups.append(
                _DecodeGroup(
                    rows=None if group_rows_ is None else self._link.upload(group_rows_),
                    blocks=self._link.upload(blocks),
                    num_rows=len(lens),
                    context_len=group.context_len,
                    mask=self._padding_mask(lens, group.context_len),
                )
            )
        return groups

    def _padding_mask(self, lens: npt.NDArray[np.int32], context_len: int) -> torch.Tensor | None:
        """0 for a row's own keys, -inf behind them."""
        if int(lens.min()) == context_len:
            return None
        inside = np.arange(context_len) < lens[:, None]
        mask = torch.zeros(inside.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(self._link.upload(~inside), -torch.inf)[:, None, None]

    def _decode(self, group: _DecodeGroup, q: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        keys, values = self._gather(group.blocks, layer)
        shape = (group.num_rows, -1, self._num_kv_heads, self._head_dim)
        queries = q if group.rows is None else q.index_select(0, group.rows)
        attended = scaled_dot_product_attention(
            # The query heads that share a KV head take the place of the query length: no K is repeated.
            queries.view(group.num_rows, self._num_kv_heads, -1, self._head_dim),
            keys.view(shape)[:, : group.context_len].transpose(1, 2),
            values.view(shape)[:, : group.context_len].transpose(1, 2),
            attn_mask=group.mask,
        ).reshape(group.num_rows, -1)
        if group.rows is None:
            out.copy_(attended)
        else:
            out.index_copy_(0, group.rows, attended)

    def _prefill_chunks(
        self, batch: InputBatch, step: StepInputs, several: npt.NDArray[np.bool_]
    ) -> list[_PrefillChunk]:
        indices = np.flatnonzero(several)
        longest = int(step.context_lens[indices].max())
        tile_len = max(_MIN_TILE, min(_MAX_TILE, _TILE_ELEMENTS // longest // 16 * 16))
        mask = None
        chunks = []
        for index in indices:
            start, end = int(step.query_offsets[index]), int(step.query_offsets[index + 1])
            context_len = int(step.context_lens[index])
            if context_len == end - start:
                chunks.append(_PrefillChunk(start, end, None, []))
                continue
            if mask is None:
                mask = self._causal_mask(tile_len, longest)
            num_blocks = -(-context_len // self._block_size)
            blocks = batch.block_table[step.slots[index], :num_blocks].astype(np.int64)
            tiles = _cut_tiles(end - start, context_len, tile_len, mask)
            chunks.append(_PrefillChunk(start, end, self._link.upload(blocks), tiles))
        return chunks

    def _causal_mask(self, tile_len: int, longest: int) -> torch.Tensor:
        """[tile_len, n + tile_len], n >= longest: row i is 0 up to column n + i. Its slices mask every tile.

        Kept for as long as it serves.
        """
        mask = self._wide_mask
        if mask.shape[0] != tile_len or mask.shape[1] < longest + tile_len:
            room = max(longest, min(2 * longest, _TILE_ELEMENTS // tile_len))
            shape = (tile_len, room + tile_len)
            mask = torch.full(shape, -torch.inf, dtype=self._prefill_dtype, device=self._device)
            self._wide_mask = mask.triu_(room + 1)
        return self._wide_mask

    def _begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """A request's first chunk attends to itself only, so the cache is not read."""
        queries, keys, values = (_heads_first(part.to(self._prefill_dtype)) for part in (q, k, v))
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        out.view(q.shape).copy_(attended[0].transpose(0, 1))

    def _go_on(self, chunk: _PrefillChunk, q: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        """A later chunk, or one after a prefix hit: its queries see the cache, tile by tile."""
        gathered = self._gather(chunk.blocks, layer)
        queries, keys, values = (_heads_first(part.to(self._prefill_dtype)) for part in (q, *gathered))
        target = out.view(q.shape)
        for tile in chunk.tiles:
            attended = scaled_dot_product_attention(
                queries[:, :, tile.start : tile.end],
                keys[:, :, : tile.num_keys],
                values[:, :, : tile.num_keys],
                attn_mask=tile.mask,
                enable_gqa=True,
            )
            target[tile.start : tile.end] = attended[0].transpose(0, 1)

    def _gather(self, blocks: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `blocks`, as `_Gathered.gather` returns them."""
        return (
            self._keys.gather(self._cache.keys[layer], blocks),
            self._values.gather(self._cache.values[layer], blocks),
        )


def _cut_tiles(num_queries: int, context_len: int, tile_len: int, mask: torch.Tensor) -> list[_PrefillTile]:
    """Tiles of the chunk's queries, each with its slice of the wide mask of `_causal_mask`."""
    longest = mask.shape[1] - tile_len
    tiles = []
    for start in range(0, num_queries, tile_len):
        end = min(start + tile_len, num_queries)
        num_before = context_len - num_queries + start
        num_keys = num_before + end - start
        shift = longest - num_before
        tiles.append(_PrefillTile(start, end, num_keys, mask[: end - start, shift : shift + num_keys]))
    return tiles


def _heads_first(part: torch.Tensor) -> torch.Tensor:
    """[n, heads, head_dim] as the view [1, heads, n, head_dim]."""
    return part.transpose(0, 1).unsqueeze(0)
