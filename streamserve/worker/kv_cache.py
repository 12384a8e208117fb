"""How many KV cache blocks there are, and their memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streamserve.errors import ConfigError
from streamserve.worker.device import free_bytes, zeros
from streamserve.worker.models.config import DecoderConfig
from streamserve.worker.spec import WorkerSpec

# Below this nothing can run: one block for the request at work and one for its next token.
MIN_BLOCKS = 2
_DEFAULT_LIMIT = 4 << 30
_DEFAULT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class KVCache:
    """Paged K and V.

    Attributes:
        keys, values: one tensor a layer, [num_blocks, block_size, num_kv_heads, head_dim].
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def block_bytes(config: DecoderConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, K and V together."""
    row = config.num_kv_heads * config.head_dim * int(dtype.itemsize)
    return 2 * config.num_layers * block_size * row


def choose_num_blocks(
    spec: WorkerSpec,
    max_model_len: int,
    bytes_per_block: int,
    device: torch.device,
    profiled_bytes: int | None = None,
) -> int:
    """How many blocks the cache gets.

    Args:
        spec: `num_blocks_override` wins, then `kv_cache_memory`, then what was measured, then a share of the
            free memory.
        max_model_len: with `max_num_seqs` it bounds what could ever be in use.
        bytes_per_block: from `block_bytes`.
        device: where the cache will be.
        profiled_bytes: what `memory_profile` leaves for it; None where nothing was measured.

    Raises:
        ConfigError: too little memory for two blocks, or more asked for than there is.
    """
    free = free_bytes(device)
    if spec.num_blocks_override is not None:
        num_blocks, option = spec.num_blocks_override, "--num-gpu-blocks-override"
    else:
        option = "--kv-cache-memory"
        limit = spec.kv_cache_memory
        if limit is None and profiled_bytes is not None:
            option, limit = "--gpu-memory-utilization", profiled_bytes
        if limit is None:
            limit = min(_DEFAULT_LIMIT, int(free * _DEFAULT_SHARE))
        usable = spec.max_num_seqs * -(-max_model_len // spec.block_size)
        num_blocks = min(limit // bytes_per_block, max(usable, MIN_BLOCKS))
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"{option}: room for {num_blocks} KV cache blocks, at least {MIN_BLOCKS} are needed; "
            f"allow {MIN_BLOCKS * bytes_per_block} bytes or more, or lower --block-size"
        )
    if num_blocks * bytes_per_block > free:
        raise ConfigError(
            f"{option}: {num_blocks * bytes_per_block} bytes for the KV cache, but only {free} are free; "
            "ask for less"
        )
    return num_blocks


def allocate(
    config: DecoderConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """The cache, all zero: attention reads padding rows too and weighs them with 0, which only finite
    numbers survive. On a CPU memory is committed when a block is first written.

    Raises:
        ConfigError: the memory cannot be had.
    """
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    try:
        tensors = [zeros(shape, dtype, device) for _ in range(2 * config.num_layers)]
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"no memory for {num_blocks} KV cache blocks; lower --kv-cache-memory, --max-num-seqs or, on a "
            "GPU, --gpu-memory-utilization"
        ) from error
    return KVCache(tensors[::2], tensors[1::2])
