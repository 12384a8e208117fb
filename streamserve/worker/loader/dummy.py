"""Random weights, for tests and benchmarks: no checkpoint but the full cost, and text that varies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

_EMBEDDING_STD = 0.02


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
    for index, (name, target) in enumerate(destinations.items()):
        if target.dim() == 1:
            target.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            std = _EMBEDDING_STD if "embed_tokens" in name else target.shape[1] ** -0.5
            target.copy_(torch.randn(target.shape, generator=generator).mul_(std))
        progress((index + 1) / len(destinations))
