"""Attention over the paged KV cache in Triton, for prefill chunks and decode rows of any mix.

    store_kv_kernel       one program a token: its K and V go to their slot
    chunk_kernel          one program for some queries of one request and one KV head; loops over all keys
    decode_kernel         one program for one request, KV head and split of the keys
    merge_splits_kernel   one program for one request and query head: joins what the splits found

Launch sizes follow from shapes alone; which request a program serves, and whether it has anything to do, it
reads from device memory. A captured launch therefore serves every later step of its shape. Requests with
one query token are served by `decode_kernel`, all others by `chunk_kernel`, whatever else is in the step,
and how many keys a split has follows from the request's own length: how a request is computed does not
depend on its batch mates.

The query heads that share a KV head are rows of one tile, so each key is loaded once for all of them.
Scores are kept in units of log 2, since the hardware's exponential has base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# Splits are a multiple of this, and it is a multiple of every tile.
SPLIT_STEP = 64
_SPLIT_STEP = tl.constexpr(SPLIT_STEP)


@triton.jit
def store_kv_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    slot_mapping_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """keys[slot_mapping[t]] = k[t], and values; a negative slot takes nothing.

    Grid (tokens,). ROW is num_kv_heads * HEAD_DIM, BLOCK the next power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    element = tl.arange(0, BLOCK)
    is_real = element < ROW
    head, within = element // HEAD_DIM, element % HEAD_DIM
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + within, mask=is_real)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + within, mask=is_real)
    tl.store(keys_ptr + slot * ROW + element, k, mask=is_real)
    tl.store(values_ptr + slot * ROW + element, v, mask=is_real)


# A kernel compiled anew for each number of requests that is 1 or a multiple of 16 would serve no better.
@triton.jit(do_not_specialize=["num_reqs"])
def chunk_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr,
    query_start_ptr, seq_lens_ptr, block_table_ptr, num_reqs,
    table_stride, q_token_stride, q_head_stride, out_token_stride, scale, soft_cap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Causal attention of requests with several query tokens.

    Grid (tokens // QUERIES + requests, KV_HEADS): enough for any split of the tokens among the requests.
    QUERIES * GROUP of the tile's ROWS are in use.
    """
    place = tl.program_id(0)
    head = tl.program_id(1)
    request = _request_at(place, query_start_ptr, num_reqs, QUERIES)
    start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - start
    first = (place - start // QUERIES - request) * QUERIES
    if (query_len < 2) | (first >= query_len):
        return
    seq_len = tl.load(seq_lens_ptr + request)

    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    query = first + row // GROUP
    is_row = (row < QUERIES * GROUP) & (query < query_len)
    is_used = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    position = seq_len - query_len + query
    token, query_head = (start + query).to(tl.int64)[:, None], (head * GROUP + row % GROUP)[:, None]
    q = tl.load(
        q_ptr + token * q_token_stride + query_head * q_head_stride + dim[None, :], is_used, other=0.0
    )

    end_key = tl.minimum(seq_len - query_len + first + QUERIES, seq_len)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - query_len + first - WINDOW + 1, 0) // TILE * TILE
    sums, weight, _ = _attend(
        q, position, first_key, end_key, head,
        keys_ptr, values_ptr, block_table_ptr + request.to(tl.int64) * table_stride, scale, soft_cap,
        KV_HEADS, HEAD_DIM, PAGE, WINDOW, HAS_CAP, ROWS, TILE, PADDED_DIM,
    )  # fmt: skip
    attended = sums / tl.where(weight == 0.0, 1.0, weight)[:, None]
    out_at = token * out_token_stride + query_head * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + out_at, attended.to(out_ptr.dtype.element_ty), is_used)


@triton.jit
def decode_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, sums_ptr, weights_ptr, peaks_ptr,
    query_start_ptr, seq_lens_ptr, block_table_ptr,
    table_stride, q_token_stride, q_head_stride, out_token_stride, scale, soft_cap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Attention of requests with one query token to the keys of one split; see `_splits_of`.

    Grid (requests, KV_HEADS, splits). What a split found goes to sums, float32[requests, heads, MAX_SPLITS,
    HEAD_DIM], and weights and peaks, float32[requests, heads, MAX_SPLITS]; a request with a single split is
    written to `out` at once.
    """
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start_ptr + request)
    seq_len = tl.load(seq_lens_ptr + request)
    split_size, first_split, end_split = _splits_of(seq_len, WINDOW, SPLIT, MAX_SPLITS)
    is_single = tl.load(query_start_ptr + request + 1) - start == 1
    if (is_single == 0) | (split < first_split) | (split >= end_split):
        return

    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    is_used = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query_head = head * GROUP + row
    q_at = start.to(tl.int64) * q_token_stride + query_head[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptr + q_at, is_used, other=0.0)
    position = tl.full([ROWS], 0, tl.int32) + (seq_len - 1)
    first_key = split * split_size
    if WINDOW > 0:
        first_key = tl.maximum(first_key, (seq_len - WINDOW) // TILE * TILE)
    sums, weight, peak = _attend(
        q, position, first_key, tl.minimum((split + 1) * split_size, seq_len), head,
        keys_ptr, values_ptr, block_table_ptr + request.to(tl.int64) * table_stride, scale, soft_cap,
        KV_HEADS, HEAD_DIM, PAGE, WINDOW, HAS_CAP, ROWS, TILE, PADDED_DIM,
    )  # fmt: skip
    if end_split - first_split == 1:
        out_at = start.to(tl.int64) * out_token_stride + query_head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_ptr + out_at, (sums / weight[:, None]).to(out_ptr.dtype.element_ty), is_used)
    else:
        part = (request.to(tl.int64) * (KV_HEADS * GROUP) + query_head) * MAX_SPLITS + split
        tl.store(weights_ptr + part, weight, row < GROUP)
        tl.store(peaks_ptr + part, peak, row < GROUP)
        tl.store(sums_ptr + part[:, None] * HEAD_DIM + dim[None, :], sums, is_used)


@triton.jit
def merge_splits_kernel(
    out_ptr,
    sums_ptr,
    weights_ptr,
    peaks_ptr,
    query_start_ptr,
    seq_lens_ptr,
    out_token_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Joins the splits of each request that has several, one after the other. Grid (requests, HEADS)."""
    request, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_start_ptr + request)
    seq_len = tl.load(seq_lens_ptr + request)
    _, first_split, end_split = _splits_of(seq_len, WINDOW, SPLIT, MAX_SPLITS)
    is_single = tl.load(query_start_ptr + request + 1) - start == 1
    if (is_single == 0) | (end_split - first_split < 2):
        return
    dim = tl.arange(0, PADDED_DIM)
    part = (request.to(tl.int64) * HEADS + head) * MAX_SPLITS
    total = tl.zeros([PADDED_DIM], tl.float32)
    weight = 0.0
    peak = tl.load(peaks_ptr + part + first_split)
    for split in range(first_split, end_split):
        split_peak = tl.load(peaks_ptr + part + split)
        new_peak = tl.maximum(peak, split_peak)
        keep, add = tl.exp2(peak - new_peak), tl.exp2(split_peak - new_peak)
        sums = tl.load(sums_ptr + (part + split) * HEAD_DIM + dim, dim < HEAD_DIM, other=0.0)
        total = total * keep + sums * add
        weight = weight * keep + tl.load(weights_ptr + part + split) * add
        peak = new_peak
    out_at = start.to(tl.int64) * out_token_stride + head * HEAD_DIM + dim
    tl.store(out_ptr + out_at, (total / weight).to(out_ptr.dtype.element_ty), dim < HEAD_DIM)


@triton.jit
def _request_at(place, query_start_ptr, num_reqs, QUERIES: tl.constexpr):
    """The request that the program at `place` serves: the last whose places begin there or before.

    The places of request i begin at query_start[i] // QUERIES + i, which leaves each at least enough of them.
    """
    low, high = 0, num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // QUERIES + middle <= place:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _splits_of(seq_len, WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """The size of a request's splits, and those [first, end) that hold the keys of its last token.

    They are as small as SPLIT, unless there were more than MAX_SPLITS then.
    """
    steps = (seq_len + MAX_SPLITS * _SPLIT_STEP - 1) // (MAX_SPLITS * _SPLIT_STEP)
    size = tl.maximum(steps * _SPLIT_STEP, SPLIT)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // size
    return size, first, (seq_len + size - 1) // size


@triton.jit
def _slots_of(key, first_key, end_key, table_ptr, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Where in the cache each of a tile's keys lies; one look into the block table if they share a page."""
    if PAGE % TILE == 0:
        page = tl.load(table_ptr + first_key // PAGE).to(tl.int64)
        return page * PAGE + key % PAGE
    pages = tl.load(table_ptr + key // PAGE, key < end_key, other=0).to(tl.int64)
    return pages * PAGE + key % PAGE


@triton.jit
def _attend(
    q, position, first_key, end_key, head,
    keys_ptr, values_ptr, table_ptr, scale, soft_cap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Online softmax of rows q over the keys [first_key, end_key) of one KV head.

    `first_key` is a multiple of TILE. Row i sees the keys up to position[i], the last WINDOW of them if
    WINDOW is not 0.

    Returns:
        float32[ROWS, PADDED_DIM] weighted sums of values, float32[ROWS] sums of weights, and float32[ROWS]
        the largest score, to whose power of 2 both are relative.
    """
    dim = tl.arange(0, PADDED_DIM)
    sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for tile_start in range(first_key, end_key, TILE):
        key = tile_start + tl.arange(0, TILE)
        slot = _slots_of(key, tile_start, end_key, table_ptr, PAGE, TILE)
        at = (slot * KV_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
        # Blocks are used again: behind the last key lies anything, infinities among it, which no weight of 0
        # would cancel.
        is_there = (key < end_key)[:, None] & (dim < HEAD_DIM)[None, :]
        keys = tl.load(keys_ptr + at, is_there, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if HAS_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        is_seen = (key[None, :] <= position[:, None]) & (key < end_key)[None, :]
        if WINDOW > 0:
            is_seen = is_seen & (position[:, None] - key[None, :] < WINDOW)
        scores = tl.where(is_seen, scores * _LOG2_E, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key yet has no peak to subtract.
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - level[:, None])
        keep = tl.exp2(peak - level)
        values = tl.load(values_ptr + at, is_there, other=0.0)
        sums = sums * keep[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        weight = weight * keep + tl.sum(weights, 1)
        peak = new_peak
    return sums, weight, peak
