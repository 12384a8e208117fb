"""Fills a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from streamserve.worker.loader.checkpoint import load_checkpoint
from streamserve.worker.loader.dummy import fill_random


def load_weights(
    load_format: str,
    folder: Path,
    seed: int,
    destinations: Mapping[str, torch.Tensor],
    progress: Callable[[float], None],
) -> None:
    """Writes every tensor in `destinations`, by random numbers if `load_format` is `dummy`.

    Args:
        load_format: as in `WorkerSpec`.
        folder: the model folder.
        seed: of the random numbers.
        destinations: checkpoint name → parameter, or the part of one, that it fills.
        progress: called with the share done, from 0 to 1.

    Raises:
        ConfigError: the checkpoint does not fit; the message names file and tensor.
    """
    if load_format == "dummy":
        fill_random(destinations, seed, progress)
    else:
        load_checkpoint(folder, destinations, progress)
