"""Random weights, for tests and benchmarks: no checkpoint but the full cost, and text that varies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

_EMBEDDING_STD = 0.02
# Larger matrices are filled from as many numbers, over and over: a processor makes some hundred million a
# second, and large models have as many as that by the dozen. A prime, so that no two rows are alike.
POOL_SIZE = 16_777_213


def fill_random(
    destinations: Mapping[str, torch.Tensor], seed: int, progress: Callable[[float], None]
) -> None:
    """Fills `destinations` from `seed`: the same numbers on every device and in every run.

    Matrices keep the scale of their input, norms are 1, biases 0.

    Args:
        destinations: checkpoint name → parameter, or the part of one, to fill.
        seed: any whole number; torch takes 64 bits of it.
        progress: called with the share done, from 0 to 1.
    """
    generator = torch.Generator().manual_seed(seed % 2**64)
    pools: dict[torch.device, torch.Tensor] = {}
    for index, (name, target) in enumerate(destinations.items()):
        if target.dim() == 1:
            target.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            std = _EMBEDDING_STD if "embed_tokens" in name else target.shape[1] ** -0.5
            if target.numel() <= POOL_SIZE:
                target.copy_(torch.randn(target.shape, generator=generator).mul_(std))
            else:
                if target.device not in pools:
                    pools[target.device] = torch.randn(POOL_SIZE, generator=generator).to(target.device)
                _repeat(pools[target.device], target, std, generator)
        progress((index + 1) / len(destinations))


def _repeat(pool: torch.Tensor, target: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Fills contiguous `target` with `pool` times `std`, from a random place on and over and over."""
    flat = target.view(-1)
    start = int(torch.randint(len(pool), (), generator=generator))
    done = 0
    while done < len(flat):
        part = pool[start : start + len(flat) - done]
        flat[done : done + len(part)].copy_(part).mul_(std)
        done += len(part)
        start = 0
