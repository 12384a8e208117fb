"""Compiled models: the tokens of eager ones, from code that is compiled once and before it is needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_rig import NUM_BLOCKS, SHAPE, Rig, play
from tiny_model import VOCAB_SIZE, make_tiny_model

from streamserve.errors import ConfigError
from streamserve.worker.attention.torch_paged import TorchPagedAttention
from streamserve.worker.compile import check_compile
from streamserve.worker.graphs.mode import CUDAGraphMode
from streamserve.worker.inductor import Inductor
from streamserve.worker.loader import load_weights
from streamserve.worker.models.compiled import CompiledModel, PiecewiseModel, WholeModel
from streamserve.worker.models.config import read_decoder_config
from streamserve.worker.models.cpu_product import packs_weights
from streamserve.worker.models.llama import ForwardBuffers, LlamaModel
from streamserve.worker.models.registry import build_model
from streamserve.worker.spec import WorkerSpec
from streamserve.worker.worker import Worker

pytestmark = [
    pytest.mark.torch,
    # Of torch about itself, when its inductor is first imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

CPU = torch.device("cpu")
NUM_LAYERS = 4
PIECES = ["before the first attention", "between two attentions", "after the last attention"]
# As many tokens as a forward is traced with, so that all of these tests share their code in the cache.
MOST_TOKENS = 64
# Of the largest number in the result. Float32 has 7 digits; sums are taken in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with enough layers that some of them share their code."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "four-layers", num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def compile_spec(
    folder: Path, spec_for: Callable[..., WorkerSpec], cpp_compiler: str, own_cache: Path
) -> Callable[..., WorkerSpec]:
    """The spec of a worker that compiles; keyword arguments change single fields."""

    def make(**changes: Any) -> WorkerSpec:
        settings = {
            "max_num_seqs": SHAPE.max_num_seqs,
            "max_num_batched_tokens": MOST_TOKENS,
            "max_model_len": SHAPE.max_model_len,
            "num_blocks_override": NUM_BLOCKS,
            "compile": "pieces",
            "compile_cache": str(own_cache / "compiled"),
        }
        return spec_for(folder, **{**settings, **changes})

    return make


@pytest.fixture(autouse=True)
def nothing_traced() -> Iterator[None]:
    """A process has one model, here it has several, which would count against each other."""
    yield
    torch._dynamo.reset()


def started(spec: WorkerSpec) -> Worker:
    worker = Worker(spec)
    worker.start(lambda what, share: None)
    return worker


@pytest.fixture(scope="module")
def eager(folder: Path) -> LlamaModel:
    model = build_model(read_decoder_config(folder), torch.float32, CPU)
    load_weights("auto", folder, 0, model.destinations(), lambda share: None)
    return model


def compiled(
    kind: type[PiecewiseModel] | type[WholeModel], eager: LlamaModel, cache: Path
) -> tuple[CompiledModel, Inductor]:
    inductor = Inductor(cache / "compiled")
    model = kind(eager, MOST_TOKENS, inductor)
    with inductor.warming_up():
        model.warm_up()
    return model, inductor


class MixingAttention:
    """Stands in for attention: what it writes depends on all that it is given, and on the layer."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        layer: int,
        metadata: Any,
    ) -> None:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        out.copy_(((q * k).tanh() * v + 0.1 * layer).flatten(1))


def hidden_of(model: Any, count: int, buffers: ForwardBuffers | None = None) -> torch.Tensor:
    """What a forward of `count` tokens comes to."""
    token_ids = torch.arange(7, 7 + 3 * count, 3, dtype=torch.int32) % VOCAB_SIZE
    positions = torch.arange(count) * 5 % 200
    with torch.inference_mode():
        return model.forward(token_ids, positions, MixingAttention(), None, buffers).clone()


def assert_close(hidden: torch.Tensor, expected: torch.Tensor) -> None:
    assert (hidden - expected).abs().max() <= TOLERANCE * expected.abs().max()


def num_traced() -> int:
    """Torch's own count of graphs that it traced, whoever compiles them."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (PiecewiseModel, PIECES),
        (WholeModel, [f"part {index}" for index in range(NUM_LAYERS + 1)]),
    ],
)
def test_any_number_of_tokens_runs_what_is_compiled(
    eager: LlamaModel,
    cpp_compiler: str,
    own_cache: Path,
    kind: type[PiecewiseModel] | type[WholeModel],
    names: list[str],
) -> None:
    model, inductor = compiled(kind, eager, own_cache)
    assert [each.name for each in inductor.compilations] == names
    traced = num_traced()
    buffers = ForwardBuffers.allocate(eager.config, MOST_TOKENS, torch.float32, CPU)
    for count in range(1, MOST_TOKENS + 1):
        expected = hidden_of(eager, count)
        assert_close(hidden_of(model, count), expected)
        # As graphs run it.
        assert_close(hidden_of(model, count, buffers.rows(count)), expected)
    assert num_traced() == traced
    assert len(inductor.compilations) == len(names)
    assert inductor.num_refused == 0


def test_the_graph_is_split_however_it_names_the_attention(
    eager: LlamaModel, cpp_compiler: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's versions differ in whether a traced operator is the one called or its overload."""

    def attend(self: object, q: Any, k: Any, v: Any, out: Any, *, layer: int, metadata: Any) -> None:
        torch.ops.streamserve.attend.default(q, k, v, out, layer)

    monkeypatch.setattr("streamserve.worker.models.compiled._MarkedAttention.forward", attend)
    model, inductor = compiled(WholeModel, eager, own_cache)
    assert len(inductor.compilations) == NUM_LAYERS + 1
    assert_close(hidden_of(model, 9), hidden_of(eager, 9))


def test_an_attention_that_is_not_found_is_noticed(
    eager: LlamaModel, cpp_compiler: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be compiled into a piece, and raise when that runs."""

    def attend(self: object, q: Any, k: Any, v: Any, out: Any, *, layer: int, metadata: Any) -> None:
        if layer != 1:
            torch.ops.streamserve.attend(q, k, v, out, layer)

    monkeypatch.setattr("streamserve.worker.models.compiled._MarkedAttention.forward", attend)
    with pytest.raises(Exception, match=r"split at the attentions of layers \[0, 2, 3\], not of all 4"):
        compiled(WholeModel, eager, own_cache)


@pytest.mark.parametrize("level", ["pieces", "whole"])
def test_a_long_day(folder: Path, compile_spec: Callable[..., WorkerSpec], level: str) -> None:
    """Requests come and go, in chunks, with shared prefixes, preempted: the tokens are those without."""
    truth = play(Rig(folder, CUDAGraphMode.NONE, attention=TorchPagedAttention).execute)
    worker = started(compile_spec(compile=level))
    made = list(worker.compilations())
    assert len(made) == (len(PIECES) if level == "pieces" else NUM_LAYERS + 1)
    traced = num_traced()
    assert play(worker.execute) == truth
    assert num_traced() == traced
    assert list(worker.compilations()) == made
    worker.close()


def test_a_step_of_one_token_at_most(compile_spec: Callable[..., WorkerSpec], folder: Path) -> None:
    """The smallest budget there is has nothing to be dynamic in, and gets the same code."""
    worker = started(compile_spec(max_num_batched_tokens=1, max_num_seqs=1))
    assert [each.name for each in worker.compilations()] == PIECES
    worker.close()


def test_a_second_start_finds_the_code(
    compile_spec: Callable[..., WorkerSpec], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streamserve")
    started(compile_spec()).close()
    torch._dynamo.reset()
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    worker = started(compile_spec())
    assert [each.from_cache for each in worker.compilations()] == [True] * len(PIECES)
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == hits + len(PIECES)
    told = [message for message in caplog.messages if message.startswith("compiled in")]
    assert "3 of 3 from the cache" in told[1]
    worker.close()


def test_code_is_kept_in_the_folder(cpp_compiler: str, tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    for is_second in (False, True):
        inductor = Inductor(folder)
        double = torch.compile(lambda x: x * 2 + 1, backend=inductor.backend("double"))
        with inductor.warming_up():
            assert double(torch.ones(3)).tolist() == [3.0] * 3
        assert [(each.name, each.from_cache) for each in inductor.compilations] == [("double", is_second)]
        assert any(folder.iterdir())
        torch._dynamo.reset()
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_what_fits_no_compiled_code_runs_uncompiled(
    eager: LlamaModel, cpp_compiler: str, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for a compiler once streams are running."""
    model, inductor = compiled(PiecewiseModel, eager, own_cache)
    token_ids, positions = torch.arange(9, dtype=torch.int32), torch.arange(9, dtype=torch.int32)
    with torch.inference_mode():
        expected = eager.forward(token_ids, positions, MixingAttention(), None)
        assert_close(model.forward(token_ids, positions, MixingAttention(), None), expected)
    assert len(inductor.compilations) == len(PIECES)
    assert inductor.num_refused == 1
    assert "runs uncompiled" in caplog.text


def test_a_failed_compilation_is_survived(
    folder: Path,
    compile_spec: Callable[..., WorkerSpec],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no space left in the compiler\nand more of that")

    monkeypatch.setattr("torch._inductor.compile", fail)
    worker = started(compile_spec())
    assert worker.compilations() == ()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("--compile pieces failed, the model runs uncompiled: ")
    assert "no space left in the compiler" in warning
    truth = play(Rig(folder, CUDAGraphMode.NONE, attention=TorchPagedAttention).execute, 40)
    assert play(worker.execute, 40) == truth
    worker.close()


def test_no_compiler(folder: Path, spec_for: Callable[..., WorkerSpec]) -> None:
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(ConfigError, match=r"--compile whole: finds no C\+\+ compiler; install g\+\+"),
    ):
        Worker(spec_for(folder, compile="whole")).start(lambda what, share: None)


def test_no_triton(
    folder: Path, spec_for: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    spec = spec_for(folder, compile="pieces")
    with pytest.raises(ConfigError, match=r"--compile pieces: needs the package triton, pip install"):
        check_compile(spec, torch.bfloat16, torch.device("cuda"))


def test_slower_than_none(
    folder: Path, spec_for: Callable[..., WorkerSpec], cpp_compiler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled code takes plain matrices, which in bfloat16 a CPU would rather have packed."""
    if not packs_weights(torch.bfloat16, CPU):
        pytest.skip("this build of torch packs no weights")
    check_compile(spec_for(folder, compile="none"), torch.bfloat16, CPU)
    check_compile(spec_for(folder, compile="pieces"), torch.float32, CPU)
    assert caplog.text == ""
    check_compile(spec_for(folder, compile="whole"), torch.bfloat16, CPU)
    assert "--compile whole is slower than none" in caplog.text
    assert "use --compile none or --dtype float32" in caplog.text


def test_emulated_graphs_are_refused(folder: Path, spec_for: Callable[..., WorkerSpec]) -> None:
    spec = spec_for(folder, compile="pieces", cudagraph_mode="PIECEWISE")
    with pytest.raises(ConfigError, match="--compile pieces: emulated graphs do not see"):
        Worker(spec).start(lambda what, share: None)
