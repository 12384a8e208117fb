"""What a 50,000-token document does to others: `python -m loadtest.micro.document`.

Eight answers decode on a tiny random Llama. Their rate is taken alone, and while a document of 50,000 tokens
is read beside them at the default token budget, once with documents at the default share of the time and once
without a limit. The rate alone is taken before and after each document. All in processor time, on one thread.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.micro.steady_engine import BLOCK_SIZE, SteadyEngine
from loadtest.micro.tiny_engine import write_tiny_llama
from streamserve.config.sections import SchedulerConfig
from streamserve.engine.executor.inline import InlineExecutor
from streamserve.engine.pacing import StepPacer
from streamserve.engine.scheduler.scheduler import SchedulerLimits
from streamserve.worker.spec import WorkerSpec

NUM_STREAMS, DOCUMENT_TOKENS = 8, 50_000
# As the engine has it by default on a CPU.
BUDGET = 512
MAX_MODEL_LEN = 65_536
NUM_BLOCKS = 3 * MAX_MODEL_LEN // BLOCK_SIZE
STEPS_ALONE = 300
LEAST_SHARE_OF_RATE = 0.6


@dataclass(frozen=True, slots=True)
class Reading:
    """How a document was read.

    Attributes:
        alone: steps a second without it.
        beside: steps a second during it.
        seconds: that it took.
        longest: seconds of the longest step.
    """

    alone: float
    beside: float
    seconds: float
    longest: float


def read_document(folder: Path, document_share: float) -> Reading:
    """Reads a document beside the streams of a new engine."""
    spec = WorkerSpec(
        model_path=str(folder),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        seed=0,
        max_model_len=None,
        max_num_seqs=NUM_STREAMS + 1,
        max_num_batched_tokens=BUDGET,
        block_size=BLOCK_SIZE,
        kv_cache_memory=None,
        num_blocks_override=NUM_BLOCKS,
        cpu_threads=1,
    )
    executor = InlineExecutor(spec)
    executor.start(lambda what, fraction: None)
    limits = SchedulerLimits(
        max_num_seqs=NUM_STREAMS + 1,
        max_num_batched_tokens=BUDGET,
        long_prefill_token_threshold=0,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=True,
        eos_token_ids=(),
    )
    engine = SteadyEngine(NUM_STREAMS, executor, limits, pacer=StepPacer(document_share))
    alone = [engine.turn(STEPS_ALONE)]
    engine.add(np.random.default_rng(1).integers(3, 500, DOCUMENT_TOKENS, dtype=np.int32), max_tokens=1)
    steps = [engine.turn(1)]
    while engine.scheduler.statistics().running > NUM_STREAMS:
        steps.append(engine.turn(1))
    alone.append(engine.turn(STEPS_ALONE))
    return Reading(2 / sum(alone), len(steps) / sum(steps), sum(steps), max(steps))


def main() -> int:
    """Prints the table; 1 if the others' rate falls too far at the default share."""
    default = SchedulerConfig().document_share
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_llama(Path(folder))
        readings = {share: read_document(Path(folder), share) for share in (default, 1.0)}
    print(f"{NUM_STREAMS} answers, beside them a document of {DOCUMENT_TOKENS:,} tokens, budget {BUDGET}")
    for share, reading in readings.items():
        print(
            f"  documents at most {share:4.0%} of the time: {reading.beside:7.1f} tokens/s each, "
            f"{reading.beside / reading.alone:4.0%} of {reading.alone:.1f} alone; longest step "
            f"{reading.longest * 1e3:.0f} ms; read in {reading.seconds:.1f} s"
        )
    kept = readings[default].beside / readings[default].alone
    passed = kept >= LEAST_SHARE_OF_RATE
    print("PASS" if passed else "FAIL", f"(bar: at least {LEAST_SHARE_OF_RATE:.0%} of the rate)")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
