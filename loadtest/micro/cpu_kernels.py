"""What the native kernels bring on a CPU: `python -m loadtest.micro.cpu_kernels [--quick]`.

Backends run in turns (torch, cpu, torch, …) in one process; a ratio is the median over pairs of neighbours.
First attention alone, of one decode step over 30 layers as SmolLM2-135M has them, then whole steps of two
workers on a model of its shape with made-up weights, and on a tiny one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from loadtest.micro.tiny_engine import TINY_LLAMA
from streamserve.engine.step import EMPTY, Join, StepDiff
from streamserve.sampling import SamplingParams
from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.attention.select import choose_attention_backend, find_attention_facts
from streamserve.worker.attention.variant import AttentionVariant
from streamserve.worker.batch import BatchShape, InputBatch
from streamserve.worker.device import zeros
from streamserve.worker.kv_cache import KVCache
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.spec import WorkerSpec
from streamserve.worker.worker import Worker

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
SMOLLM2 = {
    **TINY_LLAMA,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 49_152,
    "max_position_embeddings": 2048,
}
BLOCK_SIZE, MAX_LEN, MAX_SEQS = 16, 2048, 64
# Streams and tokens of context of each.
DECODES = ((1, 500), (8, 100), (8, 500), (8, 1500), (20, 400), (32, 500), (32, 1500))
TINY_DECODE = (64, 130)
LEAST_GAIN = 1.2


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over pairs of runs.

    Attributes:
        torch_ms, cpu_ms: time of each.
        ratio: of torch's time to that of the kernels.
    """

    torch_ms: float
    cpu_ms: float
    ratio: float


def compare(on_torch: Callable[[], None], on_cpu: Callable[[], None], rounds: int) -> Comparison:
    """Runs both in turns, `rounds` times, after one of each that does not count."""
    on_torch()
    on_cpu()
    pairs = [(_milliseconds(on_torch), _milliseconds(on_cpu)) for _ in range(rounds)]
    torch_ms, cpu_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Comparison(torch_ms, cpu_ms, statistics.median(a / b for a, b in pairs))


def _milliseconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def decode_joins(num_seqs: int, context: int, num_tokens: int = 1) -> StepDiff:
    """Requests that have all but `num_tokens` tokens in the cache, in blocks dealt at random."""
    width = MAX_LEN // BLOCK_SIZE
    blocks = np.random.default_rng(0).permutation(MAX_SEQS * width).astype(np.int32).reshape(MAX_SEQS, width)
    params = SamplingParams(max_tokens=10_000, temperature=0.0, ignore_eos=True)
    tokens = np.full(context, 5, dtype=np.int32)
    joins = [
        Join(slot, tokens, context, context - num_tokens, blocks[slot], params) for slot in range(num_seqs)
    ]
    slots = np.arange(num_seqs, dtype=np.int32)
    return StepDiff(1, joins=joins, slots=slots, num_tokens=np.full(num_seqs, num_tokens, dtype=np.int32))


class AttentionRig:
    """A cache of 30 layers in bfloat16, and both backends on it."""

    def __init__(self) -> None:
        shape = (MAX_SEQS * MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        # One layer's numbers for all, each in memory like that of a worker's cache.
        one = torch.randn(shape).to(torch.bfloat16)
        cpu = torch.device("cpu")
        parts = [zeros(shape, torch.bfloat16, cpu).copy_(one) for _ in range(2 * LAYERS)]
        self._cache = KVCache(parts[::2], parts[1::2])
        self._shape = BatchShape(MAX_SEQS, 512, MAX_LEN, BLOCK_SIZE)

    def compare(self, num_seqs: int, context: int, rounds: int) -> Comparison:
        """Attention of a step in which so many requests decode."""
        torch_step, cpu_step = (self._step(name, num_seqs, context) for name in ("torch", "cpu"))
        return compare(torch_step, cpu_step, rounds)

    def _step(self, name: str, num_seqs: int, context: int) -> Callable[[], None]:
        cpu = torch.device("cpu")
        batch = InputBatch(self._shape, SamplingColumns(MAX_SEQS, 10, ()), cpu)
        facts = find_attention_facts(cpu, torch.bfloat16, HEAD_DIM, BLOCK_SIZE, name)
        choice = choose_attention_backend(name, facts)
        backend: AttentionBackend = choice.create(self._cache, self._shape, AttentionVariant(HEADS))
        backend.bind(batch)
        batch.apply(decode_joins(num_seqs, context))
        heads = torch.randn(num_seqs, HEADS + 2 * KV_HEADS, HEAD_DIM).to(torch.bfloat16)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        out = torch.empty(num_seqs, HEADS * HEAD_DIM, dtype=torch.bfloat16)

        def run() -> None:
            with torch.inference_mode():
                metadata = backend.build(batch, batch.prepare())
                for layer in range(LAYERS):
                    backend.forward(q, k, v, out, layer=layer, metadata=metadata)

        return run


class ModelRig:
    """Two workers on one model."""

    def __init__(self, config: dict[str, object], cpu_threads: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            self._workers = [_worker(folder, name, cpu_threads) for name in ("torch", "cpu")]

    def compare(self, num_seqs: int, context: int, rounds: int) -> Comparison:
        """Whole steps in which so many requests decode; contexts grow by one a step."""
        slots = np.arange(num_seqs, dtype=np.int32)
        for worker in self._workers:
            worker.execute(decode_joins(num_seqs, context))
        steps = [lambda worker=worker: worker.execute(StepDiff(step=2)) for worker in self._workers]
        result = compare(steps[0], steps[1], rounds)
        for worker in self._workers:
            worker.execute(StepDiff(3, slots, slots=EMPTY, num_tokens=EMPTY))
        return result


def _worker(folder: str, backend: str, cpu_threads: int) -> Worker:
    worker = Worker(
        WorkerSpec(
            model_path=folder,
            load_format="dummy",
            dtype="bfloat16",
            device="cpu",
            seed=0,
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=2048,
            block_size=BLOCK_SIZE,
            kv_cache_memory=None,
            num_blocks_override=MAX_SEQS * MAX_LEN // BLOCK_SIZE,
            cpu_threads=cpu_threads,
            attention_backend=backend,
        )
    )
    worker.start(lambda what, share: None)
    return worker


def main() -> int:
    """Prints the tables; 1 unless a step of the SmolLM2 shape gains at 20 streams."""
    quick = "--quick" in sys.argv[1:]
    rounds = 5 if quick else 15
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, bfloat16; ms torch, ms cpu, ratio")
    attention = AttentionRig()
    for case in DECODES:
        print(f"  attention of 30 layers  {_line(case, attention.compare(*case, rounds))}")
    del attention
    model = ModelRig(SMOLLM2, 0)
    gain = 0.0
    for case in DECODES:
        compared = model.compare(*case, rounds)
        print(f"  step, SmolLM2's shape   {_line(case, compared)}")
        gain = compared.ratio if case == (20, 400) else gain
    del model
    print(
        f"  step, tiny model        {_line(TINY_DECODE, ModelRig(TINY_LLAMA, 1).compare(*TINY_DECODE, 40))}"
    )
    passed = gain >= LEAST_GAIN
    print(f"{'PASS' if passed else 'FAIL'}: step at 20 streams {gain:.2f} times as fast (bar: {LEAST_GAIN})")
    return 0 if passed else 1


def _line(case: tuple[int, int], compared: Comparison) -> str:
    streams, context = case
    return (
        f"{streams:3} streams, {context:4} tokens: {compared.torch_ms:8.2f} {compared.cpu_ms:8.2f} "
        f"{compared.ratio:6.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
