"""The mixed trace: what happens in it, and what a dispatcher says of it."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.gpu_check.trace import play, predict
from streamserve.engine.step import StepDiff, StepResult
from streamserve.worker.batch import BatchShape
from streamserve.worker.graphs.descriptor import BatchDescriptor
from streamserve.worker.graphs.dispatcher import GraphDispatcher
from streamserve.worker.graphs.mode import CUDAGraphMode, RuntimeMode

pytestmark = pytest.mark.torch

SHAPE = BatchShape(max_num_seqs=8, max_num_tokens=48, max_model_len=256, block_size=16)
NUM_BLOCKS = 24


class Echo:
    """A worker that gives each request its own length as its next token, plus `shift`."""

    def __init__(self, shift: int = 0) -> None:
        self._known = np.zeros(SHAPE.max_num_seqs, np.int32)
        self._computed = np.zeros(SHAPE.max_num_seqs, np.int32)
        self._slots = self._counts = np.zeros(0, np.int32)
        self._shift = shift

    def execute(self, diff: StepDiff) -> StepResult:
        for join in diff.joins:
            self._known[join.slot], self._computed[join.slot] = len(join.tokens), join.num_computed
        if diff.slots is not None:
            assert diff.num_tokens is not None
            self._slots, self._counts = diff.slots.copy(), diff.num_tokens.copy()
        self._computed[self._slots] += self._counts
        sampling = self._slots[self._computed[self._slots] == self._known[self._slots]]
        tokens = self._known[sampling] + self._shift
        self._known[sampling] += 1
        return StepResult(diff.step, sampling, tokens.astype(np.int32))


def test_much_happens_in_a_trace() -> None:
    trace = play(Echo().execute, SHAPE, NUM_BLOCKS, 512, num_steps=300)
    assert len(trace.outputs) > 15
    assert trace.preempted > 0
    assert trace.cached > 0
    decodes = [step for step in trace.steps if step.uniform]
    assert 20 < len(trace.steps) - len(decodes) < len(decodes)
    assert all(step.num_tokens <= SHAPE.max_num_tokens for step in trace.steps)


def test_what_happens_does_not_depend_on_the_tokens() -> None:
    one, same, other = (play(Echo(s).execute, SHAPE, NUM_BLOCKS, 512, num_steps=200) for s in (0, 0, 9))
    assert one == same
    assert one.steps == other.steps
    assert one.outputs != other.outputs
    assert {k: len(v) for k, v in one.outputs.items()} == {k: len(v) for k, v in other.outputs.items()}


def test_a_prediction_counts_graphs_and_padding() -> None:
    dispatcher = GraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, (1, 4, 16), 8)
    steps = [
        BatchDescriptor(3, 3, True),
        BatchDescriptor(4, 4, True),
        BatchDescriptor(6, 2, False),
        BatchDescriptor(17, 2, False),
    ]
    predicted = predict(dispatcher, steps)
    assert predicted.steps == {RuntimeMode.NONE: 1, RuntimeMode.PIECEWISE: 1, RuntimeMode.FULL: 2}
    assert predicted.padded_tokens == 1 + 0 + 10 + 0
