"""What sampling parameters cost a step: `python -m loadtest.micro.sampler`.

Logits of 64 requests over a vocabulary of 49,152 (SmolLM2's), each with 500 known tokens, go through the
sampler alone. Each case and plain greedy are timed in turns; shown are the median time of a step and the
median of the differences to plain greedy.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from streamserve.sampling import SamplingParams, TokenSet
from streamserve.worker.sampler import Sampler
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.token_pool import TokenPool

NUM_REQUESTS = 64
VOCAB_SIZE = 49_152
NUM_PROMPT, NUM_KNOWN = 300, 500
ROUNDS = 15
CASES: dict[str, dict[str, Any]] = {
    "logprobs 0": {"logprobs": 0},
    "logprobs 20": {"logprobs": 20},
    "logprobs 20, top_p": {"logprobs": 20, "temperature": 0.8, "top_p": 0.9},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence, frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias, 300 ids": {"logit_bias": tuple((i * 100, 1.0) for i in range(300))},
    "bad_words, 100": {"bad_words": tuple((i, i + 1, i + 2) for i in range(100))},
    "allowed_token_ids, 1000": {"allowed_token_ids": TokenSet.of(range(1000))},
    "min_tokens": {"min_tokens": 1000},
}


class _Case:
    """A sampler whose slots are all taken under `settings`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        device = torch.device("cpu")
        columns = SamplingColumns(NUM_REQUESTS, VOCAB_SIZE, (0,))
        pool = TokenPool(NUM_REQUESTS, 1024, device)
        rng = np.random.default_rng(0)
        params = SamplingParams(max_tokens=2000, **{"temperature": 0.0, **settings})
        for slot in range(NUM_REQUESTS):
            columns.put(slot, params, NUM_PROMPT)
            pool.write(slot, rng.integers(0, VOCAB_SIZE, NUM_KNOWN).astype(np.int32))
        self._sampler = Sampler(columns, pool, VOCAB_SIZE, device)
        self._slots = np.arange(NUM_REQUESTS, dtype=np.int32)
        self._positions = np.full(NUM_REQUESTS, NUM_KNOWN, dtype=np.int32)

    def milliseconds(self, logits: torch.Tensor) -> float:
        """Time of one step."""
        own = logits.clone()
        start = time.perf_counter()
        self._sampler.sample(own, self._slots, self._positions)
        return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Measures all cases on one thread."""
    torch.set_num_threads(1)
    logits = torch.randn(NUM_REQUESTS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    plain = _Case({})
    plain.milliseconds(logits)
    print(f"torch {torch.__version__}, 1 thread, {NUM_REQUESTS} requests, vocabulary {VOCAB_SIZE}")
    with torch.inference_mode():
        for name, settings in CASES.items():
            case = _Case(settings)
            case.milliseconds(logits)
            pairs = [(plain.milliseconds(logits), case.milliseconds(logits)) for _ in range(ROUNDS)]
            base, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
            added = statistics.median(whole - base for base, whole in pairs)
            print(f"  {name:24} {whole:7.2f} ms a step    greedy {base:5.2f}    added {added:6.2f}")


if __name__ == "__main__":
    main()
