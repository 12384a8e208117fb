"""A long random day of a worker: requests come, share prefixes, are read in chunks, preempted and aborted.

The real scheduler decides the steps, and what happens does not depend on the tokens that come out.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from streamserve.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from streamserve.engine.scheduler.states import Request
from streamserve.engine.step import StepDiff, StepResult
from streamserve.hashing import BlockHasher
from streamserve.messages import AddRequest
from streamserve.sampling import SamplingParams
from streamserve.worker.batch import BatchShape
from streamserve.worker.graphs.descriptor import BatchDescriptor
from streamserve.worker.graphs.dispatcher import GraphDispatcher
from streamserve.worker.graphs.mode import RuntimeMode

Execute = Callable[[StepDiff], StepResult]

_PROMPT_LENGTHS = ((1, 8), (9, 40), (41, 120))


@dataclass(slots=True)
class Trace:
    """What happened, and what came of it.

    Attributes:
        outputs: request → its tokens.
        steps: the shape of each step.
        preempted: how often a request lost its slot and was taken in again.
        cached: prompt tokens found in the prefix cache.
    """

    outputs: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    steps: list[BatchDescriptor] = field(default_factory=list)
    preempted: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a dispatcher makes of the steps of a trace: of `GraphCounters`, the part that follows from it."""

    steps: dict[RuntimeMode, int]
    padded_tokens: int


def predict(dispatcher: GraphDispatcher, steps: Sequence[BatchDescriptor]) -> Predicted:
    """How often each kind of graph runs, and how many rows of padding with it."""
    counts = dict.fromkeys(RuntimeMode, 0)
    padded = 0
    for step in steps:
        found = dispatcher.dispatch(step)
        counts[found.mode] += 1
        padded += found.padded.num_tokens - step.num_tokens
    return Predicted(counts, padded)


class _Day:
    """One trace as it is played."""

    def __init__(self, execute: Execute, shape: BatchShape, num_blocks: int, vocab_size: int) -> None:
        self._execute, self._vocab_size, self._shape = execute, vocab_size, shape
        self._hasher = BlockHasher(b"b" * 32, shape.block_size)
        limits = SchedulerLimits(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_tokens,
            long_prefill_token_threshold=0,
            num_blocks=num_blocks,
            block_size=shape.block_size,
            max_model_len=shape.max_model_len,
            enable_prefix_caching=True,
            eos_token_ids=(),
        )
        self._scheduler = Scheduler(limits, self._hasher)
        self._prompts: list[list[int]] = []
        self._counts = np.zeros(0, dtype=np.int32)
        self.trace = Trace()

    def arrive(self, rng: random.Random) -> None:
        """A new request, half of them with the beginning of an earlier prompt."""
        length = rng.randint(*rng.choice(_PROMPT_LENGTHS))
        prompt = [rng.randrange(3, self._vocab_size) for _ in range(length)]
        if self._prompts and rng.random() < 0.5:
            prompt = [*rng.choice(self._prompts[-3:]), *prompt][: self._shape.max_model_len - 100]
        params = SamplingParams(
            max_tokens=rng.randint(3, 90), temperature=rng.choice((0.0, 0.0, 1.0)), seed=7, ignore_eos=True
        )
        tokens = np.array(prompt, dtype=np.int32)
        add = AddRequest(len(self._prompts), tokens, len(prompt), params, self._hasher.chain(tokens))
        self._prompts.append(prompt)
        self._scheduler.add(Request(0, add))

    def abort(self, rng: random.Random) -> None:
        """Somebody goes away, if he is still there."""
        if self._prompts:
            self._scheduler.abort(0, rng.randrange(len(self._prompts)))

    def step(self) -> None:
        """One step, if there is anything to run."""
        diff = self._scheduler.schedule()
        if diff is None:
            return
        if diff.num_tokens is not None:
            self._counts = diff.num_tokens.copy()
        self.trace.preempted += sum(len(join.tokens) > join.num_prompt for join in diff.joins)
        total, num_reqs = int(self._counts.sum()), len(self._counts)
        self.trace.steps.append(BatchDescriptor(total, num_reqs, total == num_reqs))
        output = self._scheduler.settle(self._execute(diff))
        for stream, token in zip(output.streams.tolist(), output.token_ids.tolist(), strict=True):
            self.trace.outputs[stream].append(token)

    def end(self) -> Trace:
        """What came of it."""
        self.trace.cached = self._scheduler.statistics().prefix_hits
        return self.trace


def play(
    execute: Execute, shape: BatchShape, num_blocks: int, vocab_size: int, *, num_steps: int, seed: int = 0
) -> Trace:
    """Plays a day.

    Args:
        execute: of a worker, or what stands in for one.
        shape: bounds of every step.
        num_blocks: of its KV cache; few of them make for preemption.
        vocab_size: of the model.
        num_steps: how long it is.
        seed: what happens.
    """
    rng = random.Random(seed)
    day = _Day(execute, shape, num_blocks, vocab_size)
    for _ in range(num_steps):
        if rng.random() < 0.02:
            day.abort(rng)
        if rng.random() < 0.3:
            day.arrive(rng)
        day.step()
    return day.end()
