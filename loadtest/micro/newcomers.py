"""What newcomers do to answers that stream: `python -m loadtest.micro.newcomers`.

Eight answers decode on a random Llama of the size of SmolLM2-135M, and four prompts of 600 tokens come in at
a time: with the default limit on the length of a step beside answers, and without one, in turns. A step is
the pause in every answer's text.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from loadtest.micro.steady_engine import BLOCK_SIZE, SteadyEngine
from loadtest.micro.tiny_engine import TINY_LLAMA
from streamserve.config.sections import SchedulerConfig
from streamserve.engine.executor.inline import InlineExecutor
from streamserve.engine.pacing import StepPacer
from streamserve.engine.scheduler.scheduler import SchedulerLimits
from streamserve.worker.spec import WorkerSpec

NUM_STREAMS, NUM_NEWCOMERS, PROMPT_TOKENS = 8, 4, 600
NUM_SEQS = NUM_STREAMS + NUM_NEWCOMERS
# As the engine has it by default on a CPU.
BUDGET = 512
MAX_MODEL_LEN, NUM_BLOCKS = 4096, 2048
VOCAB = 49152
ROUNDS = 3
MOST_OF_A_STEP, MOST_OF_THE_TIME = 0.6, 2.0
LLAMA = TINY_LLAMA | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": VOCAB,
}


@dataclass(frozen=True, slots=True)
class Reading:
    """How the newcomers' prompts were read.

    Attributes:
        longest: seconds of the longest step.
        seconds: until the last of them had its first token.
    """

    longest: float
    seconds: float


class Server:
    """The engine with eight answers under way.

    Args:
        folder: of the model.
        limit_s: see `StepPacer`.
    """

    def __init__(self, folder: Path, limit_s: float) -> None:
        spec = WorkerSpec(
            model_path=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            device="cpu",
            seed=0,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=BUDGET,
            block_size=BLOCK_SIZE,
            kv_cache_memory=None,
            num_blocks_override=NUM_BLOCKS,
            cpu_threads=len(os.sched_getaffinity(0)),
        )
        executor = InlineExecutor(spec)
        executor.start(lambda what, fraction: None)
        limits = SchedulerLimits(
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=BUDGET,
            long_prefill_token_threshold=0,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=True,
            eos_token_ids=(),
        )
        self._engine = SteadyEngine(NUM_STREAMS, executor, limits, pacer=StepPacer(1.0, limit_s))
        self._rng = np.random.default_rng(1)
        # The first prompts of a start are slower than any later one.
        self.receive()

    def alone(self) -> float:
        """Seconds of a step without newcomers."""
        return self._engine.turn(10, time.perf_counter)

    def receive(self) -> Reading:
        """Reads the prompts of some newcomers, who leave with their first token."""
        for _ in range(NUM_NEWCOMERS):
            tokens = self._rng.integers(3, VOCAB, PROMPT_TOKENS, dtype=np.int32)
            self._engine.add(tokens, max_tokens=1)
        steps = [self._engine.turn(1, time.perf_counter)]
        while self._is_reading:
            steps.append(self._engine.turn(1, time.perf_counter))
        return Reading(max(steps), sum(steps))

    @property
    def _is_reading(self) -> bool:
        statistics = self._engine.scheduler.statistics()
        return statistics.running + statistics.waiting > NUM_STREAMS


def main() -> int:
    """Prints the table; 1 if the limit does not shorten the pauses, or if it costs the newcomers too much."""
    limit_s = SchedulerConfig().mixed_step_limit
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        limited, free = (Server(Path(folder), seconds) for seconds in (limit_s, 0.0))
    alone = median([limited.alone(), free.alone()])
    newcomers = f"{NUM_NEWCOMERS} prompts of {PROMPT_TOKENS} tokens"
    print(f"{NUM_STREAMS} answers, {alone * 1e3:.0f} ms a step; {newcomers} come in at a time")
    pairs = []
    for _ in range(ROUNDS):
        pairs.append((limited.receive(), free.receive()))
        with_limit, without = pairs[-1]
        print(
            f"  longest step {with_limit.longest * 1e3:5.0f} ms, all read in {with_limit.seconds:4.1f} s; "
            f"without the limit {without.longest * 1e3:5.0f} ms, {without.seconds:4.1f} s"
        )
    step = median(a.longest / b.longest for a, b in pairs)
    read = median(a.seconds / b.seconds for a, b in pairs)
    passed = step <= MOST_OF_A_STEP and read <= MOST_OF_THE_TIME
    print(
        f"{'PASS' if passed else 'FAIL'} longest step {step:.2f} of that without the limit (bar: at most "
        f"{MOST_OF_A_STEP}), all read in {read:.2f} times the time (bar: at most {MOST_OF_THE_TIME:.0f})"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
