"""Counter-based randomness: the noise of a token is a pure function of (seed, position, token id).

A request's tokens therefore do not depend on what else is in the batch, on preemption, or on a restart. The
integer part is defined by `noise_bits_reference` and must be equal bit for bit wherever it is computed; it
needs nothing but 32-bit xor, shift, add and multiply. The floating part may differ in the last digit.

Sampling by the Gumbel-max rule: argmax(logit / temperature + gumbel) is a draw from the softmax.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

UInt32Array = npt.NDArray[np.uint32]

# Multipliers of MurmurHash3's finaliser, and the golden ratio, which spreads neighbouring token ids apart.
_MULTIPLY_1 = 0x85EBCA6B
_MULTIPLY_2 = 0xC2B2AE35
_GOLDEN = 0x9E3779B1
_SALT_0 = 0x243F6A88
_SALT_1 = 0x13198A2E
# A position enters the two keys of a row differently, so that they never move in step.
_PLACE_FACTORS = np.array([1, _GOLDEN], dtype=np.uint32)
_LOW_31_BITS = 0x7FFFFFFF
# Largest float32 below 1: keeps the logarithm of 1 - u finite.
_BELOW_ONE = 1.0 - 2.0**-24


def seed_key(seed: int) -> UInt32Array:
    """The part of a row's key that stays the same for a whole request, uint32[2].

    Args:
        seed: any int64.
    """
    words = np.array([seed], dtype=np.int64).view(np.uint32)
    low, high = words[:1], words[1:]
    key_0 = _finalise(_finalise(low ^ np.uint32(_SALT_0)) ^ high)
    key_1 = _finalise(_finalise(high ^ np.uint32(_SALT_1)) ^ low)
    return np.concatenate((key_0, key_1))


def row_keys(seed_keys: UInt32Array, positions: npt.NDArray[np.integer]) -> UInt32Array:
    """Two 32-bit keys for each row, uint32[r, 2].

    Args:
        seed_keys: uint32[r, 2], each row from `seed_key`.
        positions: [r], number of known tokens before the one to be sampled.
    """
    places = positions.astype(np.uint32)[:, None] * _PLACE_FACTORS
    return _finalise(seed_keys + places)


def noise_bits_reference(keys: UInt32Array, token_ids: npt.NDArray[np.integer]) -> UInt32Array:
    """32 random bits for each row and token id: the definition.

    Args:
        keys: uint32[r, 2] from `row_keys`.
        token_ids: [n] for all rows or [r, n].

    Returns:
        uint32[r, n].
    """
    bits = (token_ids.astype(np.uint32) * np.uint32(_GOLDEN)) ^ keys[:, :1]
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(_MULTIPLY_1)
    bits ^= bits >> np.uint32(13)
    bits += keys[:, 1:]
    bits *= np.uint32(_MULTIPLY_2)
    bits ^= bits >> np.uint32(16)
    return bits


def noise_bits(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`noise_bits_reference` in torch, whose int32 holds the uint32 bit pattern.

    Args:
        keys: int32[r, 2].
        token_ids: int32[n] for all rows or [r, n].

    Returns:
        int32[r, n].
    """
    bits = (token_ids * _signed(_GOLDEN)) ^ keys[:, :1]
    shifted = torch.empty_like(bits)
    _xor_shift(bits, 16, shifted)
    bits.mul_(_signed(_MULTIPLY_1))
    _xor_shift(bits, 13, shifted)
    bits.add_(keys[:, 1:])
    bits.mul_(_signed(_MULTIPLY_2))
    _xor_shift(bits, 16, shifted)
    return bits


def gumbel_noise(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel variables from random bits: finite, float32, between -2.9 and 22.2.

    The uniform is taken so that large noise comes from numbers near 0, where floats are dense: tokens down
    to a probability of 2**-32 keep their share.
    """
    uniform = bits.bitwise_and(_LOW_31_BITS).to(torch.float32)
    minus_uniform = uniform.add_(0.5).mul_(-(2.0**-31)).clamp_(min=-_BELOW_ONE)
    exponential = minus_uniform.log1p_().neg_()
    return exponential.log_().neg_()


def _finalise(value: UInt32Array) -> UInt32Array:
    """MurmurHash3's 32-bit finaliser."""
    value = (value ^ (value >> np.uint32(16))) * np.uint32(_MULTIPLY_1)
    value = (value ^ (value >> np.uint32(13))) * np.uint32(_MULTIPLY_2)
    return value ^ (value >> np.uint32(16))


def _xor_shift(bits: torch.Tensor, distance: int, scratch: torch.Tensor) -> None:
    """bits ^= bits >> distance as unsigned: torch shifts the sign in, the mask takes it out again."""
    torch.bitwise_right_shift(bits, distance, out=scratch)
    scratch.bitwise_and_((1 << (32 - distance)) - 1)
    bits.bitwise_xor_(scratch)


def _signed(word: int) -> int:
    """The int32 with the bit pattern of a uint32."""
    return word - (1 << 32) if word >= 1 << 31 else word
