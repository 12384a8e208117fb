"""Choosing tokens on the device: three kernels that sort nothing and ask the host nothing.

    cut_kernel     one program a row: how likely a token must be to pass min_p, top_k and top_p
    draw_kernel    one program for a part of a row: the best token there, by logit plus noise
    pick_kernel    one program a row: the best of all its parts

What top_k and top_p let through are the tokens from some logit on. That logit is found by halving the range
in which it may lie, over the row's own values: some twenty passes, and exact. Tokens as likely as the last
one let through are let through with it.

The noise is that of `gumbel`, bit for bit until it becomes a floating-point number.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the settings, int32[rows, NUM_COLUMNS]; those from TEMPERATURE to TOP_P are bits of float32.
KEY_0, KEY_1, TEMPERATURE, LOG_MIN_P, TOP_P, TOP_K, IS_GREEDY, NUM_COLUMNS = range(8)

_KEY_0, _KEY_1, _TEMPERATURE = tl.constexpr(KEY_0), tl.constexpr(KEY_1), tl.constexpr(TEMPERATURE)
_LOG_MIN_P, _TOP_P, _TOP_K = tl.constexpr(LOG_MIN_P), tl.constexpr(TOP_P), tl.constexpr(TOP_K)
_IS_GREEDY, _NUM_COLUMNS = tl.constexpr(IS_GREEDY), tl.constexpr(NUM_COLUMNS)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def cut_kernel(logits_ptr, settings_ptr, floors_ptr, row_stride, vocab_size, BLOCK: tl.constexpr):
    """floors[row]: the least logit over temperature that is let through. Grid (rows,)."""
    row = tl.program_id(0)
    settings = settings_ptr + row * _NUM_COLUMNS
    logits = logits_ptr + row.to(tl.int64) * row_stride
    temperature, log_min_p = _float_at(settings + _TEMPERATURE), _float_at(settings + _LOG_MIN_P)
    top_p, top_k = _float_at(settings + _TOP_P), tl.load(settings + _TOP_K)
    floor = tl.full([], _NEVER, tl.float32)
    if (log_min_p > _NEVER) | (top_k < vocab_size) | (top_p < 1.0):
        likeliest = tl.full([BLOCK], _NEVER, tl.float32)
        for start in range(0, vocab_size, BLOCK):
            likeliest = tl.maximum(likeliest, _scaled(logits, start, vocab_size, temperature, BLOCK))
        peak = tl.max(likeliest, 0)
        floor = peak + log_min_p
        if top_k < vocab_size:
            needed = top_k.to(tl.float32)
            floor = _floor_of(logits, temperature, vocab_size, floor, peak, needed, False, BLOCK)
        if top_p < 1.0:
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab_size, BLOCK):
                scaled = _scaled(logits, start, vocab_size, temperature, BLOCK)
                total += tl.where(scaled >= floor, _weights(scaled, peak), 0.0)
            needed = top_p * tl.sum(total, 0)
            floor = _floor_of(logits, temperature, vocab_size, floor, peak, needed, True, BLOCK)
    tl.store(floors_ptr + row, floor)


@triton.jit
def draw_kernel(
    logits_ptr,
    settings_ptr,
    floors_ptr,
    scores_ptr,
    token_ids_ptr,
    row_stride,
    vocab_size,
    HAS_FLOORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of a part of the vocabulary that is best by logit plus noise; greedy rows get no noise.

    Grid (rows, parts of BLOCK tokens). Puts its score, float32, and its id, int32, where [rows, parts] says.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    settings = settings_ptr + row * _NUM_COLUMNS
    scores = _scaled(
        logits_ptr + row.to(tl.int64) * row_stride,
        part * BLOCK,
        vocab_size,
        _float_at(settings + _TEMPERATURE),
        BLOCK,
    )
    if tl.load(settings + _IS_GREEDY) == 0:
        if HAS_FLOORS:
            scores = tl.where(scores >= tl.load(floors_ptr + row), scores, _NEVER)
        token_ids = part * BLOCK + tl.arange(0, BLOCK)
        bits = noise_bits(tl.load(settings + _KEY_0), tl.load(settings + _KEY_1), token_ids)
        scores += gumbel_noise(bits)
    best, index = tl.max(scores, 0, return_indices=True)
    at = row * tl.num_programs(1) + part
    tl.store(scores_ptr + at, best)
    tl.store(token_ids_ptr + at, part * BLOCK + index)


@triton.jit
def pick_kernel(scores_ptr, token_ids_ptr, out_ptr, num_parts, BLOCK: tl.constexpr):
    """out[row]: the id with the best score of the row's parts, the least of several. Grid (rows,)."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + row * num_parts + part, part < num_parts, other=_NEVER)
    _, index = tl.max(scores, 0, return_indices=True)
    tl.store(out_ptr + row, tl.load(token_ids_ptr + row * num_parts + index))


@triton.jit
def noise_bits(key_0, key_1, token_ids):
    """uint32: `gumbel.noise_bits_reference` for the keys of one row, given as int32."""
    bits = token_ids.to(tl.uint32) * 0x9E3779B1
    bits = bits ^ key_0.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) + key_1.to(tl.uint32, bitcast=True)
    bits = bits * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def gumbel_noise(bits):
    """float32: what `gumbel.gumbel_noise` makes of the bits, to the last digits."""
    uniform = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # -log(1 - u). A hardware logarithm has but an absolute precision, too little where its result is small;
    # there the series of 2 atanh(u / (2 - u)) has all digits.
    root = uniform / (2.0 - uniform)
    square = root * root
    series = 1.0 / 13.0 + square * (1.0 / 15.0)
    series = 1.0 / 9.0 + square * (1.0 / 11.0 + square * series)
    series = 1.0 / 5.0 + square * (1.0 / 7.0 + square * series)
    series = 2.0 * root * (1.0 + square * (1.0 / 3.0 + square * series))
    exponential = tl.where(uniform < 0.5, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _floor_of(
    logits, temperature, vocab_size, lowest, peak, needed, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """The greatest of a row's values, `lowest` and up, from which on there is as much as `needed`.

    That is a number of tokens, or a weight; `lowest` itself where there is less in all.
    """
    low, high = _rank(lowest).to(tl.int64), _rank(peak).to(tl.int64)
    while low < high:
        # Above low, at most high. Each pass rules one side out, up to the next value that the row has.
        middle = high - (high - low) // 2
        amount = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        below = tl.full([BLOCK], -0x7FFFFFFF, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            scaled = _scaled(logits, start, vocab_size, temperature, BLOCK)
            rank = _rank(scaled)
            is_above = rank >= middle
            if BY_WEIGHT:
                amount += tl.where(is_above, _weights(scaled, peak), 0.0)
            else:
                amount += is_above.to(tl.float32)
            above = tl.minimum(above, tl.where(is_above, rank, 0x7FFFFFFF))
            below = tl.maximum(below, tl.where(is_above, -0x7FFFFFFF, rank))
        if tl.sum(amount, 0) >= needed:
            low = tl.min(above, 0).to(tl.int64)
        else:
            high = tl.max(below, 0).to(tl.int64)
    return _value(low.to(tl.int32))


@triton.jit
def _scaled(logits, start, vocab_size, temperature, BLOCK: tl.constexpr):
    """Logits over temperature of the tokens from `start` on; what is no number or no token counts as -inf."""
    token_ids = start + tl.arange(0, BLOCK)
    scaled = tl.div_rn(tl.load(logits + token_ids, token_ids < vocab_size, other=_NEVER), temperature)
    return tl.where(scaled == scaled, scaled, _NEVER)  # noqa: PLR0124


@triton.jit
def _weights(scaled, peak):
    """exp(scaled - peak), also for an infinite peak."""
    return tl.where(scaled == peak, 1.0, tl.exp(scaled - peak))


@triton.jit
def _rank(value):
    """int32 in the order of the float32."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(rank):
    """The float32 of a rank."""
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def _float_at(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)
