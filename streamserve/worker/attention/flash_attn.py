"""Paged attention with the packages of FlashAttention-2 (`flash_attn`) and 3 (`flash_attn_interface`).

Both read block tables, return what they computed in a fresh tensor, and take part of their launch from host
numbers; what that allows inside a captured graph differs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from streamserve.worker.attention.base import GraphSupport
from streamserve.worker.attention.metadata import PagedAttentionBackend, PagedMetadata
from streamserve.worker.attention.triton_paged import KVStore
from streamserve.worker.attention.variant import AttentionVariant
from streamserve.worker.batch import BatchShape
from streamserve.worker.kv_cache import KVCache


class _FlashAttention(PagedAttentionBackend):
    """What both have in common.

    Args:
        cache: the paged KV cache.
        variant: what the model asks for.
    """

    def __init__(self, cache: KVCache, variant: AttentionVariant) -> None:
        self._cache = cache
        # The packages could store K and V themselves, but not skip the rows of padding.
        self._store = KVStore(cache)
        window = variant.sliding_window
        self._options: dict[str, Any] = {
            "softmax_scale": cache.keys[0].shape[-1] ** -0.5,
            "causal": True,
            # Keys to the left and to the right of the query's own.
            "window_size": (window - 1, 0) if window else (-1, -1),
            "softcap": variant.soft_cap,
        }


class FlashAttention2(_FlashAttention):
    """The `flash_attn` package.

    Steps in which every request has one token go to its decode function, which splits the keys; that is the
    only one fit for a graph. The other one lays its rows out by `max_seqlen_q`, a host number, and wants
    the lengths of the keys as a running sum.

    Args:
        cache: the paged KV cache.
        shape: bounds of every step.
        variant: what the model asks for.
    """

    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM_SINGLE_TOKEN

    def __init__(self, cache: KVCache, shape: BatchShape, variant: AttentionVariant) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        super().__init__(cache, variant)
        self._attend_chunks = flash_attn_varlen_func
        self._attend_decodes = flash_attn_with_kvcache
        self._key_start = torch.zeros(shape.max_num_seqs + 1, dtype=torch.int32, device=cache.keys[0].device)

    @staticmethod
    def supports_block_size(block_size: int) -> bool:
        """Multiples of 256."""
        return block_size > 0 and block_size % 256 == 0

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
        """See `AttentionBackend.forward`. Hot."""
        self._store.store(k, v, metadata.slot_mapping, layer)
        keys, values, num_reqs = self._cache.keys[layer], self._cache.values[layer], metadata.num_reqs
        if metadata.max_query_len == 1:
            attended = self._attend_decodes(
                q[:num_reqs].unsqueeze(1),
                keys,
                values,
                cache_seqlens=metadata.seq_lens,
                block_table=metadata.block_table,
                **self._options,
            )
            out[:num_reqs].copy_(attended.view(num_reqs, -1))
            return
        key_start = self._key_start[: num_reqs + 1]
        torch.cumsum(metadata.seq_lens, 0, dtype=torch.int32, out=key_start[1:])
        attended = self._attend_chunks(
            q,
            keys,
            values,
            cu_seqlens_q=metadata.query_start,
            cu_seqlens_k=key_start,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            block_table=metadata.block_table,
            **self._options,
        )
        out.copy_(attended.view(out.shape))


class FlashAttention3(_FlashAttention):
    """The `flash_attn_interface` package, for Hopper GPUs.

    One function serves all steps, and finds each request's rows and keys on the device. How it splits the
    keys follows from host numbers, so only steps of one query length are captured.

    Args:
        cache: the paged KV cache.
        shape: bounds of every step.
        variant: what the model asks for.
    """

    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM_BATCH

    def __init__(self, cache: KVCache, shape: BatchShape, variant: AttentionVariant) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        super().__init__(cache, variant)
        self._attend = flash_attn_with_kvcache

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
        """See `AttentionBackend.forward`. Hot."""
        self._store.store(k, v, metadata.slot_mapping, layer)
        attended = self._attend(
            q,
            self._cache.keys[layer],
            self._cache.values[layer],
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start,
            max_seqlen_q=metadata.max_query_len,
            **self._options,
        )
        out.copy_(attended.view(out.shape))
