"""How long a device takes, and how fast its memory is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Waits until all is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of `work` on the device, over `repeats` of it in a row.

    The device is kept busy while the first of them are asked for, so that it does not wait for the host
    between them, unless each takes it less time than asking for it takes the host.

    Args:
        work: asks the device for something, on the current stream; warm.
        device: CUDA, or a CPU, where it is done when `work` returns.
        repeats: at least one.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    # Cycles of the GPU's clock; some milliseconds.
    torch.cuda._sleep(10_000_000)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats


def copy_bandwidth(device: torch.device, num_bytes: int, rounds: int = 5) -> float:
    """Bytes per second that copying a large tensor reads and writes, the best of `rounds`."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()
    best = min(device_seconds(copy, device, 5) for _ in range(rounds))
    return 2 * num_bytes / best
