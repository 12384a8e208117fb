"""What a decode step costs on the host: `python -m loadtest.micro.input_batch`.

First, preparing the inputs of a steady decode step at 256 requests: the persistent batch, which patches,
against a batch that is rebuilt from request objects each step, as simple engines do. Both are timed in turns;
the median of the ratios is what counts. Then, the whole step of a tiny random Llama (2 layers, hidden 64),
where nearly all time is the host's.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamserve.engine.step import Join, StepDiff
from streamserve.sampling import SamplingParams
from streamserve.worker.batch import BatchShape, InputBatch
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.spec import WorkerSpec
from streamserve.worker.worker import Worker

NUM_REQUESTS = 256
BLOCK_SIZE = 16
NUM_BLOCKS = 20_000
PROMPT_LEN = 100
STEPS = 200
ROUNDS = 9
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


@dataclass
class RequestObject:
    """A request as an engine without slots keeps it."""

    tokens: list[int]
    blocks: list[int]
    params: SamplingParams


class RebuiltBatch:
    """Builds the inputs of a decode step anew from the list of requests."""

    def __init__(self, requests: list[RequestObject]) -> None:
        self.requests = requests

    def step(self) -> tuple[torch.Tensor, ...]:
        """Inputs of one decode step; then every request gets a token."""
        token_ids, positions, slot_mapping, context_lens, temperatures = [], [], [], [], []
        longest = max(len(request.blocks) for request in self.requests)
        tables = []
        for request in self.requests:
            last = len(request.tokens) - 1
            token_ids.append(request.tokens[-1])
            positions.append(last)
            context_lens.append(last + 1)
            slot_mapping.append(request.blocks[last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE)
            tables.append(request.blocks + [0] * (longest - len(request.blocks)))
            temperatures.append(request.params.temperature)
        inputs = (
            torch.tensor(token_ids, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(slot_mapping, dtype=torch.int64),
            torch.tensor(context_lens, dtype=torch.int32),
            torch.tensor(tables, dtype=torch.int32),
            torch.tensor(temperatures, dtype=torch.float32),
        )
        for request in self.requests:
            request.tokens.append(7)
        return inputs


class PatchedBatch:
    """The worker's own batch, fed with the differences of a steady decode."""

    def __init__(self, requests: list[RequestObject]) -> None:
        count = len(requests)
        shape = BatchShape(count, count, 4096, BLOCK_SIZE)
        self.batch = InputBatch(shape, SamplingColumns(count, 512, ()), torch.device("cpu"))
        self.batch.apply(_all_join(requests))
        self.sampled = torch.full((count,), 7, dtype=torch.int32)
        self.diff = StepDiff(step=1)

    def step(self) -> None:
        """The same as `RebuiltBatch.step`."""
        self.batch.apply(self.diff)
        self.batch.commit(self.batch.prepare(), self.sampled)


def _requests(count: int) -> list[RequestObject]:
    """Requests with their whole block table up front: growing it is the scheduler's work."""
    blocks_each = -(-(PROMPT_LEN + (ROUNDS + 2) * STEPS) // BLOCK_SIZE)
    free = iter(np.random.default_rng(0).permutation(NUM_BLOCKS * 4).tolist())
    params = SamplingParams(max_tokens=10_000, temperature=0.0)
    return [
        RequestObject([5] * PROMPT_LEN, [next(free) for _ in range(blocks_each)], params)
        for _ in range(count)
    ]


def _all_join(requests: list[RequestObject]) -> StepDiff:
    """All requests join, with all but their last token in the cache, and decode."""
    joins = [
        Join(
            slot=slot,
            tokens=np.array(request.tokens, dtype=np.int32),
            num_prompt=len(request.tokens),
            num_computed=len(request.tokens) - 1,
            blocks=np.array(request.blocks, dtype=np.int32),
            params=request.params,
        )
        for slot, request in enumerate(requests)
    ]
    slots = np.arange(len(requests), dtype=np.int32)
    return StepDiff(step=0, joins=joins, slots=slots, num_tokens=np.ones_like(slots))


def _microseconds(step: Callable[[], Any], count: int) -> float:
    """Mean time of `step`."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count * 1e6


def compare_batches() -> None:
    """Prints the time of a step by patching and by rebuilding, and the median ratio."""
    with torch.inference_mode():
        patched, rebuilt = PatchedBatch(_requests(NUM_REQUESTS)), RebuiltBatch(_requests(NUM_REQUESTS))
        pairs = [
            (_microseconds(patched.step, STEPS), _microseconds(rebuilt.step, STEPS)) for _ in range(ROUNDS)
        ]
    by_patch, by_rebuild = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(rebuild / patch for patch, rebuild in pairs)
    print(f"inputs of a decode step, {NUM_REQUESTS} requests")
    print(f"  patched {by_patch:8.1f} us    rebuilt {by_rebuild:8.1f} us    ratio {ratio:.1f}")


def time_tiny_model() -> None:
    """Prints the time of a whole greedy and a whole sampled decode step at several batch sizes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        for count in (1, 8, 64):
            greedy = _tiny_step(folder, count, SamplingParams(max_tokens=10_000, temperature=0.0))
            sampled = _tiny_step(folder, count, SamplingParams(max_tokens=10_000, temperature=0.8, top_p=0.9))
            print(
                f"tiny Llama, {count:2d} decodes: greedy {greedy:7.1f} us    top_p {sampled:7.1f} us a step"
            )


def _tiny_step(folder: str, count: int, params: SamplingParams) -> float:
    spec = WorkerSpec(folder, "dummy", "float32", "cpu", 0, 2048, count, 512, BLOCK_SIZE, None, 8192, 1)
    worker = Worker(spec)
    worker.start(lambda what, share: None)
    blocks = np.arange(8192, dtype=np.int32).reshape(64, -1)
    tokens = [5] * PROMPT_LEN
    requests = [RequestObject(tokens, blocks[slot].tolist(), params) for slot in range(count)]
    worker.execute(_all_join(requests))
    diff = StepDiff(step=1)
    _microseconds(lambda: worker.execute(diff), 20)
    best = min(_microseconds(lambda: worker.execute(diff), STEPS) for _ in range(3))
    worker.close()
    return best


def main() -> None:
    """Runs both measurements, on one thread."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread")
    compare_batches()
    time_tiny_model()


if __name__ == "__main__":
    main()
