"""What a steady decode step costs the engine's host side, and whether overlapping steps pays.

`python -m loadtest.micro.engine_step`

First, everything that a step does except the model: EngineCore takes in messages and schedules, the worker
patches and prepares its batch and commits the sampled tokens, EngineCore settles and writes the frame into
the ring. The tokens are made up. It is timed over whole turns of `BLOCK_SIZE` steps, in which every request
fills one block and takes another, in processor time. Sizes run in turns and the best of all rounds counts.

Then, the bytes that the worker is told in such a step, against those of the batch it holds.

Last, with a tiny random Llama: a step with the worker in the engine's thread against one with the worker in a
thread of its own, two steps in flight. In turns; the median of the ratios counts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from loadtest.micro.steady_engine import BLOCK_SIZE, SteadyEngine
from loadtest.micro.tiny_engine import TINY_LLAMA, write_tiny_llama
from streamserve.engine.executor.inline import InlineExecutor
from streamserve.engine.executor.threaded import ThreadedExecutor
from streamserve.engine.scheduler.scheduler import SchedulerLimits
from streamserve.engine.step import StepDiff, StepResult
from streamserve.worker.batch import BatchShape, InputBatch
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.spec import WorkerSpec

MAX_MODEL_LEN = 4096
BATCHES = (64, 256, 1024)
ROUNDS = 25
OVERLAP_BATCH, OVERLAP_STEPS, OVERLAP_ROUNDS = 64, 48, 15
MOST_GROWTH = 3.0
MOST_DIFF_SHARE = 0.05
DIFF_BATCH, DIFF_TURNS = 256, 20
# The fixed part of a step; temperature, top_p, min_p, top_k, seed, three penalties of a request.
_STEP_BYTES, _SETTINGS_BYTES = 8, 8 * 4


@dataclass(frozen=True, slots=True)
class Finished:
    """A step whose result is there."""

    step: StepResult

    def result(self) -> StepResult:
        """What came of it."""
        return self.step


class BatchWithoutModel:
    """An executor that does all that a worker does for a decode step, except to run the model and sample.

    Attributes:
        diff_bytes: of the last step.

    Args:
        num_seqs: slots.
    """

    depth = 1

    def __init__(self, num_seqs: int) -> None:
        shape = BatchShape(num_seqs, num_seqs * BLOCK_SIZE, MAX_MODEL_LEN, BLOCK_SIZE)
        columns = SamplingColumns(num_seqs, TINY_LLAMA["vocab_size"], ())
        self._batch = InputBatch(shape, columns, torch.device("cpu"))
        self.diff_bytes = 0
        self._sampled = torch.randint(3, 500, (num_seqs,), dtype=torch.int32)

    @property
    def state_bytes(self) -> int:
        """Of what a worker without memory would have to be told of every request in every step.

        Its last token, how many are known and computed, its block table, and its sampling settings.
        """
        num_seqs = self._batch.shape.max_num_seqs
        return 4 * int(self._batch.num_blocks.sum()) + num_seqs * (3 * 4 + _SETTINGS_BYTES)

    def submit(self, diff: StepDiff) -> Finished:
        """Patches the batch, prepares the step and commits made-up tokens."""
        self.diff_bytes = _bytes_of(diff)
        with torch.inference_mode():
            self._batch.apply(diff)
            step = self._batch.prepare()
            sampled = self._sampled[: len(step.sample_slots)]
            self._batch.commit(step, sampled)
            return Finished(StepResult(diff.step, step.sample_slots, sampled.numpy()))

    def work_ahead(self) -> bool:
        """Nothing to do."""
        return False

    def statistics(self) -> dict[str, int]:
        """Nothing to say."""
        return {}


def _bytes_of(diff: StepDiff) -> int:
    """What a `StepDiff` would take on its way to another process."""
    arrays = [diff.leaves, diff.append_slots, diff.append_blocks]
    arrays += [array for array in (diff.slots, diff.num_tokens) if array is not None]
    for join in diff.joins:
        arrays += [join.tokens, join.blocks]
    return _STEP_BYTES + sum(array.nbytes for array in arrays) + len(diff.joins) * (12 + _SETTINGS_BYTES)


def limits_for(num_seqs: int, *, enable_prefix_caching: bool = True) -> SchedulerLimits:
    """Room for as many requests of full length."""
    return SchedulerLimits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * BLOCK_SIZE,
        long_prefill_token_threshold=0,
        num_blocks=num_seqs * (MAX_MODEL_LEN // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=enable_prefix_caching,
        eos_token_ids=(),
    )


def report_host_time(*, enable_prefix_caching: bool) -> float:
    """Prints the time of a step without the model; how it grows."""
    turns = {
        size: SteadyEngine(
            size, BatchWithoutModel(size), limits_for(size, enable_prefix_caching=enable_prefix_caching)
        ).turn
        for size in BATCHES
    }
    best = dict.fromkeys(turns, float("inf"))
    for _ in range(ROUNDS):
        for size, turn in turns.items():
            best[size] = min(best[size], turn())
    growth = best[max(best)] / best[min(best)]
    print(
        f"a step without the model, steady decode, prefix caching {'on' if enable_prefix_caching else 'off'}"
    )
    for size, seconds in best.items():
        print(f"  {size:>9,} requests {seconds * 1e6:8.1f} us/step {seconds / size * 1e9:8.1f} ns/request")
    print(f"  {max(best) // min(best)}x the requests: {growth:.1f}x the time")
    return growth


def report_diff() -> float:
    """Prints the bytes of a `StepDiff` and of the whole batch; their ratio."""
    executor = BatchWithoutModel(DIFF_BATCH)
    engine = SteadyEngine(DIFF_BATCH, executor, limits_for(DIFF_BATCH))
    shares = []
    for _ in range(DIFF_TURNS * BLOCK_SIZE):
        engine.turn(1)
        shares.append((executor.diff_bytes, executor.state_bytes))
    diff, state = (float(statistics.mean(column)) for column in zip(*shares, strict=True))
    print(f"what the worker is told in a step, steady decode, {DIFF_BATCH} requests of up to 350 tokens")
    print(f"  difference {diff:,.0f} bytes, whole batch {state:,.0f} bytes: {diff / state:.2%}")
    return diff / state


def report_overlap() -> None:
    """Prints what two steps in flight make of a step of a tiny Llama. Not judged."""
    with tempfile.TemporaryDirectory() as folder:
        turns = {kind.__name__: _tiny_turn(kind, Path(folder)) for kind in (InlineExecutor, ThreadedExecutor)}
    ratios: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(OVERLAP_ROUNDS):
        for name, turn in turns.items():
            times[name].append(turn(OVERLAP_STEPS, time.perf_counter))
        inline, threaded = (column[-1] for column in times.values())
        ratios.append(threaded / inline)
    print(f"a step of a tiny Llama, {OVERLAP_BATCH} requests")
    for name, column in times.items():
        print(f"  {name:<18} {statistics.median(column) * 1e6:8.1f} us/step")
    print(f"  two steps in flight: {statistics.median(ratios):.2f}x the time")


def _tiny_turn(
    kind: type[InlineExecutor | ThreadedExecutor], folder: Path
) -> Callable[[int, Callable[[], float]], float]:
    write_tiny_llama(folder)
    spec = WorkerSpec(
        model_path=str(folder),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        seed=0,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=OVERLAP_BATCH,
        max_num_batched_tokens=OVERLAP_BATCH * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        kv_cache_memory=None,
        num_blocks_override=OVERLAP_BATCH * (MAX_MODEL_LEN // BLOCK_SIZE),
        cpu_threads=1,
    )
    executor = kind(spec)
    executor.start(lambda what, fraction: None)
    return SteadyEngine(OVERLAP_BATCH, executor, limits_for(OVERLAP_BATCH)).turn


def main() -> int:
    """Prints the tables; 1 if the host's time grows more than the bar allows."""
    growth = report_host_time(enable_prefix_caching=True)
    report_host_time(enable_prefix_caching=False)
    share = report_diff()
    report_overlap()
    passed = growth <= MOST_GROWTH and share <= MOST_DIFF_SHARE
    bars = f"16x the requests at most {MOST_GROWTH}x the time, at most {MOST_DIFF_SHARE:.0%} of the batch"
    print("PASS" if passed else "FAIL", f"(bars: {bars})")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
