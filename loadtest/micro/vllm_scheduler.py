"""A steady decode step of our engine against vLLM's scheduler: `python -m loadtest.micro.vllm_scheduler`.

Neither has a model; tokens are made up. Ours is the whole host side of a step: EngineCore takes in messages
and schedules, the worker patches and prepares its batch and commits the tokens, EngineCore settles and writes
the frame for the frontend into the ring. vLLM's is its own `Scheduler`: `schedule()` and
`update_from_output()`, which makes the outputs for the frontend; encoding those for the socket is told apart.
What its worker does to prepare a step is not in it.

Both have the same number of requests, which stand at the same places of blocks of 16 tokens, with prefix
caching on. Each runs in a process of its own, vLLM in its environment (`python -m loadtest.peers.install
vllm`). They take turns of 16 steps, in which every request fills one block and takes another; times are the
thread's processor time. What counts is the median of the ratios of neighbouring turns.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

# What runs in vLLM's environment imports nothing of ours.
ROOT = Path(__file__).resolve().parent.parent.parent
BATCHES = (64, 256, 1024)
JUDGED_BATCH = 1024
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
ROUNDS = 25
MOST_RATIO = 1 / 5
OURS = "step"
VLLM_PARTS = SCHEDULE, UPDATE, ENCODE = "schedule", "update_from_output", "encode"


class Engine(Protocol):
    """Requests that decode on and on."""

    def turn(self) -> Mapping[str, float]:
        """Seconds of each part of a step, over `BLOCK_SIZE` steps."""


class OurEngine:
    """EngineCore and the worker's batch.

    Args:
        num_seqs: requests.
    """

    def __init__(self, num_seqs: int) -> None:
        from loadtest.micro.engine_step import BatchWithoutModel, limits_for
        from loadtest.micro.steady_engine import SteadyEngine

        self._engine = SteadyEngine(num_seqs, BatchWithoutModel(num_seqs), limits_for(num_seqs))

    def turn(self) -> Mapping[str, float]:
        """See `Engine`."""
        return {OURS: self._engine.turn(BLOCK_SIZE)}


class VllmEngine:
    """vLLM's scheduler with its KV cache manager, set up as its EngineCore does.

    Args:
        num_seqs: requests.
        folder: of a model; only its config is read.
    """

    def __init__(self, num_seqs: int, folder: str) -> None:
        from vllm.envs import enable_envs_cache
        from vllm.sampling_params import SamplingParams
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request
        from vllm.v1.serial_utils import MsgpackEncoder

        config = _vllm_config(num_seqs, folder)
        self._scheduler = _vllm_scheduler(config, num_seqs)
        self._encoder = MsgpackEncoder()
        self._buffer = bytearray()
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        # As its EngineCore does before the first request.
        freeze_gc_heap()
        enable_envs_cache()
        params = SamplingParams(max_tokens=MAX_MODEL_LEN, temperature=0.0, ignore_eos=True)
        for number in range(num_seqs):
            tokens = [3 + (number * 7 + place) % 500 for place in range(1 + number % BLOCK_SIZE)]
            request = Request(
                # As long as the ids that its frontend makes.
                request_id=f"cmpl-{number:016x}-0",
                prompt_token_ids=tokens,
                sampling_params=params,
                pooling_params=None,
                block_hasher=hasher,
            )
            self._scheduler.add_request(request)
        self.turn()

    def turn(self) -> Mapping[str, float]:
        """See `Engine`."""
        from vllm.v1.outputs import ModelRunnerOutput

        clock, seconds = time.thread_time, dict.fromkeys(VLLM_PARTS, 0.0)
        for _ in range(BLOCK_SIZE):
            began = clock()
            scheduled = self._scheduler.schedule()
            seconds[SCHEDULE] += clock() - began
            names = list(scheduled.num_scheduled_tokens)
            result = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[3 + index % 500] for index in range(len(names))],
            )
            began = clock()
            outputs = self._scheduler.update_from_output(scheduled, result)
            seconds[UPDATE] += clock() - began
            began = clock()
            self._encoder.encode_into(outputs[0], self._buffer)
            seconds[ENCODE] += clock() - began
            assert len(outputs[0].outputs) == len(names)
        return {part: total / BLOCK_SIZE for part, total in seconds.items()}


def _vllm_config(num_seqs: int, folder: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=folder,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = num_seqs * (MAX_MODEL_LEN // BLOCK_SIZE)
    return config


def _vllm_scheduler(config: Any, num_seqs: int) -> Any:
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    cache = KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    # A server counts for its statistics unless it is told not to.
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


def serve(whose: str, folder: str) -> int:
    """The child: for each number of requests that comes in as a line, a turn, told as a line of JSON."""
    # What libraries print does not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engines: dict[int, Engine] = {}
    for line in sys.stdin:
        num_seqs = int(line)
        if num_seqs not in engines:
            engines[num_seqs] = OurEngine(num_seqs) if whose == "ours" else VllmEngine(num_seqs, folder)
            gc.collect()
        print(json.dumps(engines[num_seqs].turn()), file=answers, flush=True)
    return 0


class Turns(Protocol):
    """An engine in another process."""

    def turn(self, num_seqs: int) -> Mapping[str, float]:
        """Seconds of each part of a step with so many requests."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process that runs turns when asked.

    Attributes:
        process: runs `serve`.
        errors: what it prints besides.
    """

    process: subprocess.Popen[str]
    errors: IO[str]

    def turn(self, num_seqs: int) -> Mapping[str, float]:
        """See `Turns`.

        Raises:
            RuntimeError: it has ended; the text holds the end of what it printed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(num_seqs, file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            code = self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"{self.process.args!r} ended with {code}: {self.errors.read()[-2000:]}")
        times: dict[str, float] = json.loads(line)
        return times


@contextlib.contextmanager
def child(command: Sequence[str]) -> Iterator[Child]:
    """Starts a child, and ends it by ending its input."""
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
        ) as process,
    ):
        yield Child(process, errors)


def compare(ours: Turns, theirs: Turns, num_seqs: int) -> float:
    """Prints the times of a step with so many requests; the median ratio."""
    pairs = [(ours.turn(num_seqs)[OURS], theirs.turn(num_seqs)) for _ in range(ROUNDS)]
    step = statistics.median(mine for mine, _ in pairs)
    parts = {part: statistics.median(times[part] for _, times in pairs) for part in VLLM_PARTS}
    whole = statistics.median(mine / sum(times.values()) for mine, times in pairs)
    bare = statistics.median(mine / (times[SCHEDULE] + times[UPDATE]) for mine, times in pairs)
    told = ", ".join(f"{part} {microseconds(seconds)}" for part, seconds in parts.items())
    print(f"  {num_seqs:,} requests: ours {microseconds(step)} us")
    print(f"    vLLM {microseconds(sum(parts.values()))} us ({told})")
    print(f"    ours / vLLM {whole:.3f}; {bare:.3f} without its encoding")
    return whole


def microseconds(seconds: float) -> str:
    """As a whole number."""
    return f"{seconds * 1e6:,.0f}"


def main(arguments: Sequence[str]) -> int:
    """Prints the table; 1 if a step takes more of vLLM's time than the bar allows."""
    if arguments[:1] == ["--serve"]:
        return serve(*arguments[1:])
    from loadtest.peers.models import peers_root, prepare_model

    python = peers_root() / "vllm" / "bin" / "python"
    if not python.exists():
        print(f"skipped: {python} is not there; run `python -m loadtest.peers.install vllm`")
        return 0
    folder = str(prepare_model("tiny").folder)
    print("host time of a steady decode step, prefix caching on")
    program = str(Path(__file__).resolve())
    with (
        child([sys.executable, program, "--serve", "ours", folder]) as ours,
        child([str(python), program, "--serve", "vllm", folder]) as theirs,
    ):
        ratios = {num_seqs: compare(ours, theirs, num_seqs) for num_seqs in BATCHES}
    passed = ratios[JUDGED_BATCH] <= MOST_RATIO
    print("PASS" if passed else "FAIL", f"(bar: at most {MOST_RATIO:.2f} at {JUDGED_BATCH:,} requests)")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
