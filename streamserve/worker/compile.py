"""What `--compile` does: checks that it can be done here, compiles, and goes on eagerly where that fails."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from streamserve.errors import ConfigError
from streamserve.worker.graphs.build import requested_mode
from streamserve.worker.graphs.mode import CUDAGraphMode
from streamserve.worker.inductor import Compilation, Inductor
from streamserve.worker.models.cpu_product import packs_weights
from streamserve.worker.models.llama import LlamaModel
from streamserve.worker.models.model import Model
from streamserve.worker.spec import WorkerSpec
from streamserve.worker.triton_launcher import launcher_obstacle

Progress = Callable[[str, float], None]

logger = logging.getLogger(__name__)

# Characters of what a compiler says that go into the log.
_MOST_REASON = 300


@dataclass(frozen=True, slots=True)
class CompiledForward:
    """A model that is ready to serve.

    Attributes:
        model: runs compiled code, or is the one that was given.
        compilations: what was compiled for it. Nothing is added later, or some step fits none of it.
    """

    model: Model
    compilations: Sequence[Compilation]


def check_compile(spec: WorkerSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Says early what a compilation would fail at late, and what speaks against it.

    Raises:
        ConfigError: a compiler is missing, or graphs are emulated.
    """
    if spec.compile == "none":
        return
    option = f"--compile {spec.compile}"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(
                f"{option}: needs the package triton, pip install 'streamserve[gpu]' or use --compile none"
            )
        if (obstacle := launcher_obstacle()) is not None:
            raise ConfigError(f"{option}: {obstacle}, or use --compile none")
        return
    if requested_mode(spec, device) is not CUDAGraphMode.NONE:
        raise ConfigError(
            f"{option}: emulated graphs do not see what compiled code does; "
            "use --compile none or --cudagraph-mode NONE"
        )
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            f"{option}: finds no C++ compiler; install g++ (apt-get install g++), name one in the variable "
            "CXX, or use --compile none"
        ) from error
    if packs_weights(dtype, device):
        logger.warning(
            "%s is slower than none in bfloat16 on a CPU: compiled code takes plain weights, which are "
            "packed for the processor otherwise; use --compile none or --dtype float32",
            option,
        )


def compile_model(spec: WorkerSpec, model: LlamaModel, progress: Progress) -> CompiledForward:
    """The model, compiled as `spec` asks for.

    A compilation that fails costs speed and nothing else, so it is no reason not to serve: the model runs
    eagerly then, and the log says why.

    Args:
        spec: that `check_compile` has nothing against.
        model: parameters loaded and not packed, since torch.compile takes plain matrices only.
        progress: see `Worker.start`.
    """
    if spec.compile == "none":
        return CompiledForward(model, ())
    progress("compiling the model", 0.0)
    inductor = Inductor(None if spec.compile_cache is None else Path(spec.compile_cache))
    try:
        compiled = _compiled(spec, model, inductor)
    except Exception as error:
        logger.warning("--compile %s failed, the model runs uncompiled: %s", spec.compile, _reason(error))
        logger.debug("the failed compilation", exc_info=True)
        model.pack()
        return CompiledForward(model, ())
    made = inductor.compilations
    logger.info(
        "compiled in %.1f s, %d of %d from the cache: %s",
        sum(each.seconds for each in made),
        sum(each.from_cache for each in made),
        len(made),
        ", ".join(f"{each.name} {each.seconds:.1f} s" for each in made),
    )
    progress("compiling the model", 1.0)
    return CompiledForward(compiled, made)


def _reason(error: Exception) -> str:
    """A line of it: compilers have much to say, and torch wraps it in more."""
    cause = getattr(error, "inner_exception", error)
    words = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {words[:_MOST_REASON]}"


def _compiled(spec: WorkerSpec, model: LlamaModel, inductor: Inductor) -> Model:
    # Imported late: it registers an operator, which takes torch a moment that others need not wait.
    from streamserve.worker.models.compiled import PiecewiseModel, WholeModel

    kind = PiecewiseModel if spec.compile == "pieces" else WholeModel
    compiled = kind(model, spec.max_num_batched_tokens, inductor)
    with inductor.warming_up():
        compiled.warm_up()
    return compiled
