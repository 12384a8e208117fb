"""The same long day under every mode: the same tokens, whether they come from graphs or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from graph_rig import NUM_BLOCKS, SHAPE, SIZES, Rig, Trace, play

from streamserve.engine.step import StepDiff, StepResult
from streamserve.worker.attention.torch_paged import TorchPagedAttention
from streamserve.worker.graphs.lazy import LazyCapture
from streamserve.worker.graphs.mode import CUDAGraphMode, RuntimeMode
from streamserve.worker.spec import WorkerSpec
from streamserve.worker.worker import Worker

pytestmark = pytest.mark.torch

NONE, PIECEWISE, FULL = RuntimeMode


@pytest.fixture(scope="module")
def truth(tiny_model: Path) -> Trace:
    """Without graphs, on the backend that a CPU serves with."""
    return play(Rig(tiny_model, CUDAGraphMode.NONE, attention=TorchPagedAttention).execute)


def test_the_day_is_a_full_one(truth: Trace) -> None:
    assert len(truth.outputs) > 30
    assert truth.decodes > 100
    assert truth.mixed > 50
    assert min(truth.chunked, truth.preempted) >= 10
    assert min(truth.aborted, truth.shared) >= 3


@pytest.mark.parametrize(
    ("mode", "used"),
    [
        (CUDAGraphMode.NONE, set()),
        (CUDAGraphMode.PIECEWISE, {NONE, PIECEWISE}),
        (CUDAGraphMode.FULL, {NONE, FULL}),
        (CUDAGraphMode.FULL_DECODE_ONLY, {NONE, FULL}),
        (CUDAGraphMode.FULL_AND_PIECEWISE, {NONE, PIECEWISE, FULL}),
    ],
)
def test_tokens_do_not_depend_on_the_mode(
    tiny_model: Path, truth: Trace, mode: CUDAGraphMode, used: set[RuntimeMode]
) -> None:
    rig = Rig(tiny_model, mode, checks=True)
    assert play(rig.execute) == truth
    if rig.graphs is None:
        assert not used
        return
    counters = rig.graphs.counters
    assert {kind for kind, count in counters.steps.items() if count > 20} == used
    assert sum(counters.steps.values()) == truth.decodes + truth.mixed
    assert counters.padded_tokens > 50
    if mode.decode is mode.mixed or mode is CUDAGraphMode.FULL_AND_PIECEWISE:
        assert counters.fallbacks == counters.steps[NONE]
    else:
        assert counters.fallbacks == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_other_days(tiny_model: Path, seed: int) -> None:
    rig = Rig(tiny_model, CUDAGraphMode.FULL_AND_PIECEWISE, checks=True)
    truth = play(Rig(tiny_model, CUDAGraphMode.NONE, attention=TorchPagedAttention).execute, 150, seed)
    assert play(rig.execute, 150, seed) == truth


def test_a_backend_that_no_graph_can_hold_is_between_graphs(tiny_model: Path, truth: Trace) -> None:
    rig = Rig(tiny_model, CUDAGraphMode.FULL_AND_PIECEWISE, attention=TorchPagedAttention)
    assert play(rig.execute) == truth
    assert rig.graphs is not None
    assert rig.graphs.counters.steps[FULL] == 0
    assert rig.graphs.counters.steps[PIECEWISE] > 200


def test_capture_between_steps_changes_nothing(tiny_model: Path, truth: Trace) -> None:
    """Graphs appear one by one while requests run."""
    rig = Rig(tiny_model, CUDAGraphMode.FULL_AND_PIECEWISE, captured=False)
    assert rig.graphs is not None
    ticks = iter(range(100_000))
    lazy = LazyCapture(rig.graphs, clock=lambda: next(ticks))

    def execute(diff: StepDiff) -> StepResult:
        lazy.advance()
        return rig.execute(diff)

    assert play(execute) == truth
    assert rig.graphs.num_waiting == 0
    assert rig.graphs.counters.fallbacks > 50
    assert min(rig.graphs.counters.steps.values()) > 10


@pytest.mark.parametrize("lazy", [False, True])
def test_a_worker_runs_from_graphs(
    tiny_model: Path, truth: Trace, spec_for: Callable[..., WorkerSpec], lazy: bool
) -> None:
    """The same through the options of a worker."""
    worker = Worker(
        spec_for(
            tiny_model,
            max_num_seqs=SHAPE.max_num_seqs,
            max_num_batched_tokens=SHAPE.max_num_tokens,
            max_model_len=SHAPE.max_model_len,
            num_blocks_override=NUM_BLOCKS,
            cudagraph_mode="FULL_AND_PIECEWISE",
            cudagraph_capture_sizes=SIZES,
            lazy_graphs=lazy,
        )
    )
    heard: list[tuple[str, float]] = []
    worker.start(lambda what, share: heard.append((what, share)))
    captured = [share for what, share in heard if what == "capturing graphs"]
    assert captured == ([] if lazy else [index / 10 for index in range(11)])
    assert play(worker.execute) == truth
    counters = worker.graph_counters()
    assert counters is not None
    assert lazy or min(counters.steps.values()) > 20
    worker.close()


def test_a_cpu_runs_from_no_graphs_unless_told_to(tiny_worker: Worker) -> None:
    assert tiny_worker.graph_counters() is None
