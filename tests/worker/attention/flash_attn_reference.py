"""The flash-attn packages as they are documented: same arguments, every demand checked, exact results.

What the packages leave undefined is an error here, or NaN in the result. Arguments that paged inference has
no use for must keep their defaults.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from loadtest.gpu_check.paged_steps import Heads, attend


def flash_attn_2(calls: list[str]) -> types.ModuleType:
    """A stand-in for the module `flash_attn`; notes the functions that are called."""

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        calls.append("varlen")
        assert dropout_p == 0.0
        assert not deterministic
        assert not return_attn_probs
        assert alibi_slopes is None
        assert block_table is not None
        _check_cache(q, k, v, block_table, page_multiple=256)
        batch = len(block_table)
        for starts in (cu_seqlens_q, cu_seqlens_k):
            _check_lengths(starts, batch + 1)
        assert int(cu_seqlens_q[-1]) == len(q)
        query_lens, seq_lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert int(query_lens.max()) <= max_seqlen_q
        assert int(seq_lens.max()) <= max_seqlen_k
        # With one query the heads of a group take the place of queries, which presumes one row a request.
        assert max_seqlen_q > 1 or len(q) == batch
        heads = _heads(q, k, softmax_scale, causal, window_size, softcap)
        return _attend_each(q, k, v, cu_seqlens_q, seq_lens, block_table, heads)

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: None = None,
        v: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor:
        calls.append("kvcache")
        unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
        assert all(argument is None for argument in unused)
        assert (rotary_interleaved, num_splits, return_softmax_lse) == (True, 0, False)
        assert q.dim() == 4
        assert cache_seqlens is not None
        assert block_table is not None
        batch, query_len = q.shape[:2]
        _check_cache(q, k_cache, v_cache, block_table, page_multiple=256)
        assert len(block_table) == batch
        _check_lengths(cache_seqlens, batch)
        starts = torch.arange(batch + 1, dtype=torch.int32) * query_len
        heads = _heads(q, k_cache, softmax_scale, causal, window_size, softcap)
        flat = _attend_each(q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, heads)
        return flat.view(q.shape)

    return _module("flash_attn", flash_attn_varlen_func, flash_attn_with_kvcache)


def flash_attn_3(calls: list[str]) -> types.ModuleType:
    """A stand-in for the module `flash_attn_interface`."""

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: None = None,
        v: None = None,
        qv: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: None = None,
        q_descale: None = None,
        k_descale: None = None,
        v_descale: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: None = None,
        num_splits: int = 0,
        pack_gqa: None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor:
        calls.append("kvcache")
        unused = (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new)
        assert all(argument is None for argument in unused)
        unused = (rotary_seqlens, q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa)
        assert all(argument is None for argument in unused)
        assert (attention_chunk, rotary_interleaved, num_splits, sm_margin) == (0, True, 0, 0)
        assert not return_softmax_lse
        assert q.dim() == 3
        assert page_table is not None
        assert cache_seqlens is not None
        assert cu_seqlens_q is not None
        assert max_seqlen_q is not None
        _check_cache(q, k_cache, v_cache, page_table, page_multiple=1)
        _check_lengths(cu_seqlens_q, len(page_table) + 1)
        _check_lengths(cache_seqlens, len(page_table))
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        heads = _heads(q, k_cache, softmax_scale, causal, window_size, softcap)
        return _attend_each(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, heads)

    return _module("flash_attn_interface", flash_attn_with_kvcache)


def _module(name: str, *functions: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, function)
    return module


def _check_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, page_multiple: int
) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert k.dtype == v.dtype == q.dtype
    assert k.shape == v.shape
    assert k.dim() == 4
    _, page, num_kv_heads, head_dim = k.shape
    assert page % page_multiple == 0
    assert q.shape[-1] == head_dim
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert q.shape[-2] % num_kv_heads == 0
    assert {tensor.stride(-1) for tensor in (q, k, v, table)} == {1}
    assert table.dtype == torch.int32
    assert table.dim() == 2


def _check_lengths(lengths: torch.Tensor, count: int) -> None:
    assert lengths.dtype == torch.int32
    assert lengths.shape == (count,)
    assert lengths.is_contiguous()


def _heads(
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Heads:
    head_dim = q.shape[-1]
    assert softmax_scale is None or softmax_scale == head_dim**-0.5
    assert causal
    assert window_size == (-1, -1) or (window_size[0] >= 0 and window_size[1] == 0)
    return Heads(q.shape[-2], k.shape[-2], head_dim, window_size[0] + 1, softcap)


def _attend_each(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    heads: Heads,
) -> torch.Tensor:
    """Request by request; rows that belong to none are NaN, those of a request without keys 0."""
    page = k.shape[1]
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    for index, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(int(query_start[index]), int(query_start[index + 1]))
        if seq_len == 0:
            out[rows] = 0.0
            continue
        blocks = table[index, : -(-seq_len // page)].long()
        assert ((blocks >= 0) & (blocks < len(k))).all()
        keys, values = (part[blocks].flatten(0, 1)[:seq_len] for part in (k, v))
        out[rows] = attend(q[rows], keys, values, heads).view(out[rows].shape).to(q.dtype)
    return out
