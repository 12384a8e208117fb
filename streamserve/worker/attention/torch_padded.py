"""Paged attention in plain torch that a graph can hold: fixed shapes, nothing read back, slow.

Every token looks at as many keys as any request may have. It is there to prove things: what runs from a
captured graph without a GPU runs on it, and kernels that read the same `PagedMetadata` are measured against
it. Like them it believes `max_query_len` and `max_seq_len`, which a graph bakes in.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from streamserve.worker.attention.base import GraphSupport
from streamserve.worker.attention.metadata import PagedAttentionBackend, PagedMetadata
from streamserve.worker.kv_cache import KVCache

# Elements of K gathered at a time.
_GATHERED_ELEMENTS = 4 << 20


class TorchPaddedAttention(PagedAttentionBackend):
    """Gathers the whole block table of every token and masks what the token does not see.

    Args:
        cache: the paged KV cache.
    """

    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    @staticmethod
    def supports_block_size(block_size: int) -> bool:
        """Any."""
        return block_size >= 1

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        layer: int,
        metadata: PagedMetadata,
    ) -> None:
        """See `AttentionBackend.forward`; rows that belong to no request are left as they are."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        _store(keys.flatten(0, 1), k, metadata.slot_mapping)
        _store(values.flatten(0, 1), v, metadata.slot_mapping)
        owners, num_visible = _visible_keys(metadata)
        num_blocks = -(-metadata.max_seq_len // keys.shape[1])
        num_keys = num_blocks * keys.shape[1]
        chunk = max(1, _GATHERED_ELEMENTS // (num_keys * keys.shape[2] * keys.shape[3]))
        for start in range(0, metadata.num_tokens, chunk):
            rows = slice(start, start + chunk)
            tables = metadata.block_table[:, :num_blocks].index_select(0, owners[rows])
            attended = _attend(q[rows], keys, values, tables, num_visible[rows])
            out[rows].copy_(torch.where(num_visible[rows, None] > 0, attended, out[rows]))


def _store(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes rows[i] to cache[slot_mapping[i]], and nothing where that is -1.

    A row of padding writes what the first real row writes, to the same place, so that the order does not
    matter; if there is none, it writes back what the cache holds.
    """
    is_real = slot_mapping >= 0
    first = is_real.to(torch.int32).argmax().view(1)
    slot = slot_mapping.index_select(0, first).clamp(min=0)
    filler = torch.where(is_real.any(), rows.index_select(0, first), cache.index_select(0, slot))
    slots = torch.where(is_real, slot_mapping, slot)
    cache.index_copy_(0, slots, torch.where(is_real[:, None, None], rows, filler))


def _visible_keys(metadata: PagedMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[num_tokens], the request of each row; int64[num_tokens], how many of its keys the row sees.

    Rows behind the last request, and behind `max_query_len` of one, see none.
    """
    rows = torch.arange(metadata.num_tokens, device=metadata.query_start.device)
    starts, ends = metadata.query_start[:-1].to(torch.int64), metadata.query_start[1:].to(torch.int64)
    owners = torch.searchsorted(ends, rows, right=True)
    is_real = owners < metadata.num_reqs
    owners = owners.clamp(max=metadata.num_reqs - 1)
    is_real &= rows - starts.index_select(0, owners) < metadata.max_query_len
    behind = ends.index_select(0, owners) - 1 - rows
    num_visible = metadata.seq_lens.to(torch.int64).index_select(0, owners) - behind
    return owners, torch.where(is_real, num_visible, 0)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    num_visible: torch.Tensor,
) -> torch.Tensor:
    """[c, num_heads * head_dim] of rows [c] of `q`, each with the blocks of its own row of `tables`."""
    count, (_, _, num_kv_heads, head_dim) = len(q), keys.shape
    blocks = tables.reshape(-1)
    shape = (count, -1, num_kv_heads, head_dim)
    index = torch.arange(tables.shape[1] * keys.shape[1], device=q.device)
    is_visible = index < num_visible[:, None]
    # What is not seen may be anything, and 0 times infinity is not 0.
    hidden = ~is_visible[:, :, None, None]
    return scaled_dot_product_attention(
        # The query heads that share a KV head take the place of the query length: no K is repeated.
        q.reshape(count, num_kv_heads, -1, head_dim),
        keys.index_select(0, blocks).view(shape).masked_fill(hidden, 0.0).transpose(1, 2),
        values.index_select(0, blocks).view(shape).masked_fill(hidden, 0.0).transpose(1, 2),
        # A row that sees nothing gets to see the zeros that hide its first key.
        attn_mask=(is_visible | (index == 0))[:, None, None],
    ).reshape(count, -1)
