"""The time that a decode step cannot go below: what it must read, over how fast the device reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from streamserve.worker.models.config import DecoderConfig


def weight_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Weights that a decode step reads: all matrices and norms; of the embedding only a few rows.

    Args:
        config: the model's.
        itemsize: bytes of a number.
    """
    hidden, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
    attention = hidden * config.head_dim * (heads + config.num_heads)
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    return itemsize * (config.num_layers * layer + hidden + config.vocab_size * hidden)


def kv_bytes(config: DecoderConfig, contexts: Sequence[int], itemsize: int) -> int:
    """K and V that it reads.

    Args:
        config: the model's.
        contexts: tokens that each request attends to.
        itemsize: bytes of a number.
    """
    row = config.num_kv_heads * config.head_dim * itemsize
    return 2 * config.num_layers * row * sum(contexts)


def floor_seconds(num_bytes: int, bytes_per_second: float) -> float:
    """Raises:
    ValueError: there is no bandwidth to divide by.
    """
    if bytes_per_second <= 0:
        raise ValueError(f"a bandwidth of {bytes_per_second:g} bytes/s")
    return num_bytes / bytes_per_second
