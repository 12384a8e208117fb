"""Compiled pieces in captured forwards.

Emulated graphs see operators only, so here each piece is made one: what it reads and writes is then on the
tape, and what it returns is in the pool, as with the kernels of a compiled piece in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_rig import SHAPE, Rig, play

from streamserve.worker.attention.torch_paged import TorchPagedAttention
from streamserve.worker.graphs.mode import CUDAGraphMode, RuntimeMode
from streamserve.worker.inductor import Inductor
from streamserve.worker.models.compiled import PiecewiseModel
from streamserve.worker.models.llama import LlamaModel

pytestmark = [
    pytest.mark.torch,
    # Of torch about itself, when its inductor is first imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


class Operators:
    """Makes an operator of what torch.compile returns. Each call is known by a number.

    Attributes:
        num_run: how often one was called or replayed.
    """

    def __init__(self) -> None:
        self.num_run = 0
        self._compile = torch.compile
        # Within an operator a thread does without some of what tensors are checked for around it, and the
        # code would be taken to be for other tensors.
        self._thread = ThreadPoolExecutor(1)
        self._calls: list[Callable[[], Any]] = []
        self._library = torch.library.Library("streamserve_test", "DEF")
        # What a piece is called with need not be named: the call has it, and it is all buffers.
        self._library.define("piece(int call) -> Tensor[]")
        self._library.impl("piece", self._run, "CompositeExplicitAutograd")

    def compile(self, piece: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """In the place of torch.compile."""
        compiled = self._compile(piece, **options)

        def call(*args: Any) -> Any:
            self._calls.append(lambda: compiled(*args))
            return torch.ops.streamserve_test.piece(len(self._calls) - 1)

        return call

    def close(self) -> None:
        self._library._destroy()
        self._thread.shutdown()

    def _run(self, call: int) -> list[torch.Tensor]:
        self.num_run += 1
        # With the settings of a warm-up that is going on.
        settings = copy_context()
        return self._thread.submit(settings.run, self._run_in_thread, self._calls[call]).result()

    def _run_in_thread(self, call: Callable[[], Any]) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        with torch.inference_mode():
            # An operator must return memory of its own.
            return [tensor.clone() for tensor in call() or ()]


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    operators = Operators()
    monkeypatch.setattr(torch, "compile", operators.compile)
    yield operators
    operators.close()
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_tokens_are_those_without(
    tiny_model: Path, cpp_compiler: str, own_cache: Path, operators: Operators, mode: CUDAGraphMode
) -> None:
    truth = play(Rig(tiny_model, CUDAGraphMode.NONE, attention=TorchPagedAttention).execute, 150)
    inductor = Inductor(own_cache / "compiled")

    def compiled(model: LlamaModel) -> PiecewiseModel:
        pieces = PiecewiseModel(model, SHAPE.max_num_tokens, inductor)
        with inductor.warming_up():
            pieces.warm_up()
        return pieces

    rig = Rig(tiny_model, mode, checks=True, stand_in=compiled)
    captured = operators.num_run
    assert play(rig.execute, 150) == truth
    assert operators.num_run > captured
    assert rig.graphs is not None
    assert rig.graphs.counters.steps[RuntimeMode.PIECEWISE] > 10
    assert (rig.graphs.counters.steps[RuntimeMode.FULL] > 10) is (mode is CUDAGraphMode.FULL_AND_PIECEWISE)
    assert len(inductor.compilations) == 3
    assert inductor.num_refused == 0
