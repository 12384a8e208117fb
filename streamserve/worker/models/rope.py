"""Rotary position embedding: pairs (i, i + head_dim / 2) of a head are turned by position * frequency[i]."""

from __future__ import annotations

import math

import torch

from streamserve.worker.models.config import RopeConfig


class RotaryEmbedding:
    """Cosines and sines for any position; computed a step at a time, so no table grows with the length.

    Args:
        config: base and scaling.
        head_dim: even width of a head.
        dtype: of the results; angles are computed in float32.
        device: where the positions are.
    """

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        half = rope_frequencies(config, head_dim).to(device)
        self._frequencies = torch.cat((half, half))
        # Turning is x * cos + (x with its halves swapped) * sin, minus in the first half.
        self._sign = torch.cat((-torch.ones_like(half), torch.ones_like(half)))
        self._dtype = dtype

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each [t, 1, head_dim].

        Args:
            positions: int64[t].
        """
        angles = (positions.to(torch.float32).unsqueeze(1) * self._frequencies).unsqueeze(1)
        return angles.cos().to(self._dtype), (angles.sin() * self._sign).to(self._dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turns every head.

    Args:
        x: [t, heads, head_dim].
        cos, signed_sin: [t, 1, head_dim] from `RotaryEmbedding.at`.
    """
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), signed_sin)


def rope_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair, float32[head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3_scaled(frequencies, config)
    return frequencies


def _llama3_scaled(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Slow pairs are stretched by the factor, fast ones left alone, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    share_kept = (config.original_max_position / wavelengths - low) / (high - low)
    share_kept = share_kept.clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / config.factor + share_kept * frequencies
