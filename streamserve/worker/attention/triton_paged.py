"""Paged attention with our own Triton kernels: any mix of prefill and decode, any page size in steps of 16.

A step launches the same kernels with the same arguments whatever its requests are; everything that differs is
read from the tensors of `PagedMetadata`. So a captured graph may hold any step.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from streamserve.worker.attention.base import GraphSupport
from streamserve.worker.attention.metadata import PagedAttentionBackend, PagedMetadata
from streamserve.worker.attention.triton_kernels import (
    chunk_kernel,
    decode_kernel,
    merge_splits_kernel,
    store_kv_kernel,
)
from streamserve.worker.attention.variant import AttentionVariant
from streamserve.worker.batch import BatchShape
from streamserve.worker.kv_cache import KVCache

# Splits are at least this long: merging costs as much as reading a few hundred keys.
LEAST_SPLIT = 256
# A request alone keeps a GPU busy with so many programs. More want room, and each costs its start even if it
# finds nothing to do.
_MOST_PROGRAMS = 128


class KVStore:
    """Puts the K and V of a step's tokens into the cache; needs Triton, but no particular attention.

    Args:
        cache: the paged KV cache.
    """

    def __init__(self, cache: KVCache) -> None:
        _, _, num_kv_heads, self._head_dim = cache.keys[0].shape
        self._cache = cache
        self._row = num_kv_heads * self._head_dim
        self._block = _next_power_of_2(self._row)

    def store(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, layer: int) -> None:
        """Rows whose slot is -1 go nowhere.

        Args:
            k, v: [t, num_kv_heads, head_dim], contiguous in the last dimension.
            slot_mapping: int64[t].
            layer: whose cache.
        """
        store_kv_kernel[(len(slot_mapping),)](
            k,
            v,
            self._cache.keys[layer],
            self._cache.values[layer],
            slot_mapping,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            HEAD_DIM=self._head_dim,
            ROW=self._row,
            BLOCK=self._block,
        )


class TritonPagedAttention(PagedAttentionBackend):
    """Attends with the kernels of `triton_kernels`.

    Args:
        cache: the paged KV cache.
        shape: bounds of every step.
        variant: what the model asks for.
        split_size: the fewest keys that a decode program goes through, a multiple of 64; it is part of the
            arithmetic: results of different sizes differ in the last digits.
        shared_bytes: shared memory that a program may have; None asks the device.
    """

    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(
        self,
        cache: KVCache,
        shape: BatchShape,
        variant: AttentionVariant,
        split_size: int = LEAST_SPLIT,
        *,
        shared_bytes: int | None = None,
    ) -> None:
        keys = cache.keys[0]
        _, page, num_kv_heads, head_dim = keys.shape
        self._cache = cache
        self._store = KVStore(cache)
        self._num_heads, self._num_kv_heads, self._head_dim = variant.num_heads, num_kv_heads, head_dim
        self._group = variant.num_heads // num_kv_heads
        self._scale = head_dim**-0.5
        self._soft_cap = variant.soft_cap or 1.0
        self._split = split_size
        self._max_splits = choose_max_splits(shape.max_model_len, num_kv_heads, split_size)
        self._common = {
            "KV_HEADS": num_kv_heads,
            "GROUP": self._group,
            "HEAD_DIM": head_dim,
            "PAGE": page,
            "WINDOW": variant.sliding_window,
            "HAS_CAP": variant.soft_cap > 0.0,
            "PADDED_DIM": max(16, _next_power_of_2(head_dim)),
        }
        if shared_bytes is None:
            shared_bytes = _shared_bytes(keys.device)
        padded_dim = self._common["PADDED_DIM"]
        self._chunk_tile = _chunk_tile(keys.dtype, self._group, padded_dim, shared_bytes)
        self._queries = self._chunk_tile["ROWS"] // self._group
        self._decode_tile = _decode_tile(keys.dtype, self._group, padded_dim, shared_bytes)
        parts = (shape.max_num_seqs, variant.num_heads, self._max_splits if self._max_splits > 1 else 0)
        self._sums = torch.zeros((*parts, head_dim), dtype=torch.float32, device=keys.device)
        self._weights = torch.zeros(parts, dtype=torch.float32, device=keys.device)
        self._peaks = torch.zeros(parts, dtype=torch.float32, device=keys.device)

    @staticmethod
    def supports_block_size(block_size: int) -> bool:
        """Multiples of 16."""
        return block_size > 0 and block_size % 16 == 0

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
        """See `AttentionBackend.forward`; rows that belong to no request are left as they are. Hot."""
        self._store.store(k, v, metadata.slot_mapping, layer)
        self._decode(q, out, layer, metadata)
        if metadata.max_query_len > 1:
            self._chunks(q, out, layer, metadata)

    def _chunks(self, q: torch.Tensor, out: torch.Tensor, layer: int, metadata: PagedMetadata) -> None:
        """Requests with several query tokens."""
        grid = (metadata.num_tokens // self._queries + metadata.num_reqs, self._num_kv_heads)
        chunk_kernel[grid](
            q,
            self._cache.keys[layer],
            self._cache.values[layer],
            out,
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            metadata.num_reqs,
            metadata.block_table.stride(0),
            q.stride(0),
            q.stride(1),
            out.stride(0),
            self._scale,
            self._soft_cap,
            QUERIES=self._queries,
            **self._common,
            **self._chunk_tile,
        )

    def _decode(self, q: torch.Tensor, out: torch.Tensor, layer: int, metadata: PagedMetadata) -> None:
        """Requests with one query token."""
        num_splits = min(-(-metadata.max_seq_len // self._split), self._max_splits)
        decode_kernel[(metadata.num_reqs, self._num_kv_heads, num_splits)](
            q,
            self._cache.keys[layer],
            self._cache.values[layer],
            out,
            self._sums,
            self._weights,
            self._peaks,
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            metadata.block_table.stride(0),
            q.stride(0),
            q.stride(1),
            out.stride(0),
            self._scale,
            self._soft_cap,
            SPLIT=self._split,
            MAX_SPLITS=self._max_splits,
            **self._common,
            **self._decode_tile,
        )
        if num_splits == 1:
            return
        merge_splits_kernel[(metadata.num_reqs, self._num_heads)](
            out,
            self._sums,
            self._weights,
            self._peaks,
            metadata.query_start,
            metadata.seq_lens,
            out.stride(0),
            HEADS=self._num_heads,
            HEAD_DIM=self._head_dim,
            WINDOW=self._common["WINDOW"],
            SPLIT=self._split,
            MAX_SPLITS=self._max_splits,
            PADDED_DIM=self._common["PADDED_DIM"],
        )


def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program on `device` may have."""
    if device.type != "cuda":
        # The interpreter has all of the machine's.
        return 1 << 30
    num_bytes: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return num_bytes


def _chunk_tile(dtype: torch.dtype, group: int, padded_dim: int, shared_bytes: int) -> dict[str, Any]:
    """How many rows and keys a program of `chunk_kernel` holds, and with how many warps.

    Args:
        dtype: of the cache.
        group: query heads that share a KV head.
        padded_dim: of a head.
        shared_bytes: shared memory that a program may have.
    """
    least = max(16, _next_power_of_2(group))
    if dtype.itemsize == 2:
        rows, keys = _fitting(max(128, least), max(64, least), padded_dim, shared_bytes // 2)
        return {"ROWS": rows, "TILE": keys, "num_warps": 8, "num_stages": 2}
    # Float32 goes without tensor cores and takes twice the registers.
    return {"ROWS": max(32, least), "TILE": 32, "num_warps": 4, "num_stages": 1}


def _decode_tile(dtype: torch.dtype, group: int, padded_dim: int, shared_bytes: int) -> dict[str, Any]:
    """The same for `decode_kernel`: as few rows as the matrix units take."""
    rows = max(16, _next_power_of_2(group))
    if dtype.itemsize == 2:
        _, keys = _fitting(rows, rows, padded_dim, shared_bytes // 2)
        return {"ROWS": rows, "TILE": keys, "num_warps": 4, "num_stages": 3}
    return {"ROWS": rows, "TILE": 32, "num_warps": 4, "num_stages": 2}


def _fitting(rows: int, least_rows: int, padded_dim: int, room: int) -> tuple[int, int]:
    """Rows and keys of a tile whose queries, keys, values and weights are in shared memory together.

    Fewer rows come before fewer keys: more programs run at a time then, where the other way round each of
    them takes more turns.

    Args:
        rows: to begin with.
        least_rows: no fewer than that.
        padded_dim: of a head.
        room: numbers that fit into shared memory.
    """
    keys = 64
    while (rows + 2 * keys) * padded_dim + rows * keys > room and (rows > least_rows or keys > 16):
        if rows > least_rows:
            rows //= 2
        else:
            keys //= 2
    return rows, keys


def choose_max_splits(max_model_len: int, num_kv_heads: int, split_size: int) -> int:
    """The most splits of a request, so that it has not too many programs, a KV head and a split each.

    A longer one has larger splits, but a short one is spread over the GPU even if the model takes long ones.
    """
    most_splits = max(1, _MOST_PROGRAMS // num_kv_heads)
    return min(most_splits, -(-max_model_len // split_size))


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
