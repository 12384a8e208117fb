"""Tries out what a worker will do, so as to know how much memory is left for its KV cache."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import torch

from streamserve.engine.step import EMPTY, Join, StepDiff
from streamserve.errors import ConfigError
from streamserve.sampling import SamplingParams
from streamserve.worker.batch import BatchShape
from streamserve.worker.graphs.runner import GraphRunner
from streamserve.worker.kv_cache import MIN_BLOCKS
from streamserve.worker.memory_profile import GraphsOfAKind, MemoryProfile, describe
from streamserve.worker.runner import ModelRunner
from streamserve.worker.spec import MemoryAccount

logger = logging.getLogger(__name__)

# So many graphs of each kind are tried: the largest, and what each further one adds.
_NUM_TRIED = 2
# What a request may ask for that takes memory.
_ASKS_FOR_ALL = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    seed=0,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logprobs=20,
)
_ASKS_FOR_NOTHING = SamplingParams(max_tokens=1, temperature=1.0, seed=0)
# Tokens of a context that attention is split over.
_FAR = 1024


class CudaMemory:
    """`DeviceMemory` of a CUDA device; see there.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total: int = torch.cuda.mem_get_info(device)[1]

    def free(self) -> int:
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free

    def allocated(self) -> int:
        num_bytes: int = torch.cuda.memory_allocated(self._device)
        return num_bytes

    def reserved(self) -> int:
        num_bytes: int = torch.cuda.memory_reserved(self._device)
        return num_bytes

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        num_bytes: int = torch.cuda.max_memory_allocated(self._device)
        return num_bytes

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def begin_profile(device: torch.device, utilization: float) -> MemoryProfile | None:
    """A profile of `device`; None of a CPU, whose memory is not the server's to share out."""
    return MemoryProfile(CudaMemory(device), utilization) if device.type == "cuda" else None


def measure(
    profile: MemoryProfile, make_runner: Callable[[int], ModelRunner], shape: BatchShape, bytes_per_block: int
) -> MemoryAccount:
    """Runs the largest step and captures some graphs, on a runner that is thrown away.

    Args:
        profile: begun before the weights were loaded; they are there now, and little else.
        make_runner: makes the runner, on a KV cache of so many blocks. Graphs know where their cache is, so
            none of those captured here can be kept.
        shape: bounds of every step.
        bytes_per_block: of the KV cache.

    Raises:
        ConfigError: the device has no room for this, or none for a cache beside it.
    """
    with _or_no_memory(shape):
        _try_out(profile, make_runner, shape, bytes_per_block)
    account = profile.account(MIN_BLOCKS * bytes_per_block)
    logger.info("GPU memory %s", describe(account))
    return account


def warm_up(make_runner: Callable[[int], ModelRunner], shape: BatchShape) -> None:
    """Runs the steps that `measure` would, so that no request waits for a kernel to be compiled.

    Args:
        make_runner, shape: see `measure`.

    Raises:
        ConfigError: the device has no room for them.
    """
    with _or_no_memory(shape):
        runner = make_runner(MIN_BLOCKS)
        _run_trial_steps(runner, shape)
    device = runner.link.device
    del runner
    if device.type == "cuda":
        # What the cache is to take would be kept for steps else.
        CudaMemory(device).release()


def compiles_kernels(device: torch.device) -> bool:
    """Whether what runs on `device` is compiled when it is first used."""
    return str(device.type) == "cuda"


@contextmanager
def _or_no_memory(shape: BatchShape) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory on the GPU for a step of {shape.max_num_tokens} tokens; lower "
            "--max-num-batched-tokens or --max-num-seqs, or take a smaller model"
        ) from error


def _try_out(
    profile: MemoryProfile, make_runner: Callable[[int], ModelRunner], shape: BatchShape, bytes_per_block: int
) -> None:
    runner: ModelRunner | None = None

    def run() -> None:
        nonlocal runner
        runner = make_runner(MIN_BLOCKS)
        _run_trial_steps(runner, shape)

    def capture() -> Sequence[GraphsOfAKind]:
        assert runner is not None, "captured before a step has run"
        return [] if runner.graphs is None else _capture_some(runner.graphs)

    profile.run_largest(run, MIN_BLOCKS * bytes_per_block)
    profile.capture(capture)


def _run_trial_steps(runner: ModelRunner, shape: BatchShape) -> None:
    # Without kernels to sample with, one asks the device a question.
    with runner.link.allows_sync():
        for diff in trial_steps(shape):
            runner.run(diff)


def trial_steps(shape: BatchShape) -> tuple[StepDiff, StepDiff, StepDiff]:
    """The largest step there can be; one that takes the kernels that it may do without; and their leave.

    The largest has as many tokens as a step may have, in as many requests, all of which sample and ask for
    all. In the other one a request decodes at the end of a long context and samples plainly, and another one
    has several tokens. All their blocks are the first one: what is written there is worth nothing anyway.
    """
    num_seqs = min(shape.max_num_seqs, shape.max_num_tokens)
    num_tokens = min(shape.max_num_tokens, num_seqs * shape.max_model_len)
    counts = np.diff(np.arange(num_seqs + 1) * num_tokens // num_seqs).astype(np.int32)
    joins = [_join(shape, slot, count, _ASKS_FOR_ALL) for slot, count in enumerate(counts.tolist())]
    far = min(shape.max_model_len, _FAR)
    rare, rare_counts = [_join(shape, 0, far, _ASKS_FOR_NOTHING, num_computed=far - 1)], [1]
    if num_seqs > 1 and shape.max_num_tokens > 2 and shape.max_model_len > 1:
        rare.append(_join(shape, 1, 2, _ASKS_FOR_NOTHING))
        rare_counts.append(2)
    slots = np.arange(num_seqs, dtype=np.int32)
    rare_slots = slots[: len(rare)]
    return (
        StepDiff(step=0, joins=joins, slots=slots, num_tokens=counts),
        StepDiff(0, slots, rare, slots=rare_slots, num_tokens=np.array(rare_counts, dtype=np.int32)),
        StepDiff(step=0, leaves=rare_slots, slots=EMPTY, num_tokens=EMPTY),
    )


def _join(shape: BatchShape, slot: int, count: int, params: SamplingParams, *, num_computed: int = 0) -> Join:
    return Join(
        slot=slot,
        tokens=np.zeros(count, dtype=np.int32),
        num_prompt=count,
        num_computed=num_computed,
        blocks=np.zeros(-(-count // shape.block_size), dtype=np.int32),
        params=params,
    )


def _capture_some(graphs: GraphRunner) -> list[GraphsOfAKind]:
    """What can be captured; that the rest cannot is no reason not to serve (`LazyCapture`).

    Raises:
        torch.OutOfMemoryError: there is no memory for one.
    """
    kinds = []
    try:
        for _, group in groupby(graphs.waiting, key=lambda graph: graph.mode):
            kind = list(group)
            kinds.append(GraphsOfAKind(len(kind), [graphs.capture(graph) for graph in kind[:_NUM_TRIED]]))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        logger.exception("capturing a graph failed; no memory is set aside for it and those behind it")
    return kinds
