"""What prefix caching costs when nothing hits, and what it brings when 90 % of each prompt is shared.

`python -m loadtest.micro.prefix_cache`

On and off run in turns (on off, off on, …) in one process on the same tiny model, with the same prompts; a
round's ratio pairs two neighbouring runs, and the median over the rounds counts. Time is processor time of
this process, on one thread, so that other programs on the machine disturb it less.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from loadtest.micro.tiny_engine import TinyEngine

ROUNDS = 30
MOST_COST = 0.01
LEAST_GAIN = 3.0


def fresh_prompts(rng: np.random.Generator, count: int, length: int) -> list[np.ndarray]:
    """Prompts that share nothing with anything."""
    return [rng.integers(3, 512, length, dtype=np.int32) for _ in range(count)]


def shared_prompts(rng: np.random.Generator, prefix: np.ndarray, count: int) -> list[np.ndarray]:
    """Prompts whose first 90 % are `prefix`."""
    own = len(prefix) // 9
    return [np.concatenate([prefix, rng.integers(3, 512, own, dtype=np.int32)]) for _ in range(count)]


def cost_without_hits(on: TinyEngine, off: TinyEngine, rng: np.random.Generator) -> float:
    """Median of (time on) / (time off) − 1 with prompts that never hit."""
    ratios = []
    for number in range(ROUNDS):
        prompts = fresh_prompts(rng, 32, 100)
        pair = [on, off] if number % 2 else [off, on]
        seconds = {engine: engine.run(prompts, 32) for engine in pair}
        ratios.append(seconds[on] / seconds[off])
    return statistics.median(ratios) - 1


def gain_with_hits(on: TinyEngine, off: TinyEngine, rng: np.random.Generator) -> float:
    """Median of (requests/s on) / (requests/s off) with prompts that share 90 %."""
    prefix = fresh_prompts(rng, 1, 1800)[0]
    for engine in (on, off):
        engine.run([prefix], 1)
    ratios = []
    for number in range(10):
        prompts = shared_prompts(rng, prefix, 16)
        pair = [on, off] if number % 2 else [off, on]
        seconds = {engine: engine.run(prompts, 4) for engine in pair}
        ratios.append(seconds[off] / seconds[on])
    return statistics.median(ratios)


def main() -> int:
    """Prints both figures; 1 if one misses its bar."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        on = TinyEngine(Path(folder), enable_prefix_caching=True)
        off = TinyEngine(Path(folder), enable_prefix_caching=False)
        for engine in (on, off):
            engine.run(fresh_prompts(rng, 32, 100), 32)
        cost = cost_without_hits(on, off, rng)
        rate = on.hit_rate()
        gain = gain_with_hits(on, off, rng)
    print(
        f"prefix caching on / off, {ROUNDS} paired rounds on a tiny Llama, {rate:.0%} hits: {cost:+.2%} time"
    )
    print(f"prefix caching on / off, 90 % shared prefix of 2,000 tokens: {gain:.1f}x requests/s")
    passed = cost <= MOST_COST and gain >= LEAST_GAIN
    print("PASS" if passed else "FAIL", f"(bars: at most {MOST_COST:+.0%} time, at least {LEAST_GAIN:.0f}x)")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
