"""Capture while requests run: a share of the time, and no reason to drop a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from graph_rig import NUM_BLOCKS, SHAPE, SIZES, Rig, play

from streamserve.engine.step import StepDiff, StepResult
from streamserve.worker.graphs.lazy import LazyCapture
from streamserve.worker.graphs.mode import CUDAGraphMode, RuntimeMode
from streamserve.worker.graphs.tape import TapeGraph, TapeGraphs
from streamserve.worker.spec import WorkerSpec
from streamserve.worker.worker import Worker

pytestmark = pytest.mark.torch


class SmallDevice(TapeGraphs):
    """Has memory for so many graphs."""

    def __init__(self, num_graphs: int) -> None:
        self.num_left = num_graphs

    def new_graph(self) -> TapeGraph:
        if self.num_left == 0:
            raise torch.OutOfMemoryError("no memory for another graph")
        self.num_left -= 1
        return super().new_graph()


class Clock:
    """Goes on by one with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_capture_takes_a_fifth_of_the_time(tiny_model: Path) -> None:
    rig = Rig(tiny_model, CUDAGraphMode.FULL_AND_PIECEWISE, captured=False)
    assert rig.graphs is not None
    clock = Clock()
    lazy = LazyCapture(rig.graphs, clock)
    at: list[float] = []
    while rig.graphs.num_waiting:
        before = rig.graphs.num_waiting
        lazy.advance()
        if rig.graphs.num_waiting < before:
            at.append(clock.now)
    # A capture takes 1 and is followed by 4 of rest.
    assert [later - earlier for earlier, later in pairwise(at)] == [5.0] * 9
    now = clock.now
    lazy.advance()
    assert clock.now == now


def test_all_of_the_time_while_nobody_waits(tiny_model: Path) -> None:
    rig = Rig(tiny_model, CUDAGraphMode.FULL_AND_PIECEWISE, captured=False)
    assert rig.graphs is not None
    lazy = LazyCapture(rig.graphs, Clock())
    assert [lazy.advance_idle() for _ in range(12)] == [True] * 10 + [False] * 2
    assert rig.graphs.num_captured == 10
    assert play(rig.execute, 60) == play(Rig(tiny_model, CUDAGraphMode.NONE).execute, 60)


def test_no_memory_for_another_graph_while_nobody_waits(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tiny_model, CUDAGraphMode.FULL_AND_PIECEWISE, captured=False, device=SmallDevice(10))
    assert rig.graphs is not None
    lazy = LazyCapture(rig.graphs, Clock())
    assert [lazy.advance_idle() for _ in range(5)] == [True] * 4 + [False]
    assert "capturing a graph failed; 7 are left out" in caplog.text


def test_no_memory_for_another_graph(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server goes on with those that it has: decodes run from graphs for mixed steps."""
    truth = play(Rig(tiny_model, CUDAGraphMode.NONE).execute)
    # Three graphs of three segments, and one segment of the next.
    device = SmallDevice(10)
    rig = Rig(tiny_model, CUDAGraphMode.FULL_AND_PIECEWISE, captured=False, device=device)
    assert rig.graphs is not None
    lazy = LazyCapture(rig.graphs, Clock())

    def execute(diff: StepDiff) -> StepResult:
        lazy.advance()
        return rig.execute(diff)

    assert play(execute) == truth
    assert rig.graphs.num_waiting == 0
    assert rig.graphs.counters.steps[RuntimeMode.PIECEWISE] > truth.mixed
    assert rig.graphs.counters.steps[RuntimeMode.FULL] == 0
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "capturing a graph failed; 7 are left out"
    ]


def test_no_memory_for_another_graph_at_the_start(
    tiny_model: Path,
    spec_for: Callable[..., WorkerSpec],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    truth = play(Rig(tiny_model, CUDAGraphMode.NONE).execute, 60)
    device = SmallDevice(2)
    monkeypatch.setattr("streamserve.worker.graphs.build.TapeGraphs", lambda: device)
    worker = Worker(
        spec_for(
            tiny_model,
            max_num_seqs=SHAPE.max_num_seqs,
            max_num_batched_tokens=SHAPE.max_num_tokens,
            max_model_len=SHAPE.max_model_len,
            num_blocks_override=NUM_BLOCKS,
            cudagraph_mode="FULL_DECODE_ONLY",
            cudagraph_capture_sizes=SIZES,
            lazy_graphs=False,
        )
    )
    heard: list[float] = []
    worker.start(lambda what, share: heard.append(share))
    assert heard[-1] == 1.0
    assert "no memory for 2 of 4 graphs; their steps run eagerly" in caplog.messages
    assert play(worker.execute, 60) == truth
    worker.close()
