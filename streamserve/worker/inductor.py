"""Traced graphs to machine code, by torch's inductor: where its code is kept, and a count of what it did."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

CompiledGraph = Callable[..., Any]
# What torch.compile hands a graph to: the graph, what it was traced with → what runs it.
Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], CompiledGraph]

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class Compilation:
    """A graph that was compiled.

    Attributes:
        name: which part of the model it is.
        seconds: how long it took.
        from_cache: its code was there already, from an earlier start or an equal graph.
    """

    name: str
    seconds: float
    from_cache: bool


class Inductor:
    """Compiles while it is warming up, and never after.

    Compiling takes seconds in which no stream gets a token, so a graph that comes later, which nothing should
    lead to, runs as it was traced, with a warning.

    Attributes:
        compilations: in their order.
        num_refused: graphs that came too late.

    Args:
        cache_folder: of compiled code; made when first written to. None leaves the place to torch.
    """

    def __init__(self, cache_folder: Path | None) -> None:
        self.compilations: list[Compilation] = []
        self.num_refused = 0
        self._cache_folder = cache_folder
        self._is_warming_up = False

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Compiles what comes in here."""
        # Takes seconds, which would count as those of the first compilation.
        import torch._inductor.compile_fx
        import torch._inductor.config
        import torch.fx.experimental._config

        with ExitStack() as settings:
            # A size that happens to be 0 or 1 is nothing special, so that one token runs the code of many.
            settings.enter_context(torch.fx.experimental._config.patch(backed_size_oblivious=True))
            # In this process: a pool of others would outlive an engine that is killed.
            settings.enter_context(torch._inductor.config.patch(compile_threads=1, fx_graph_cache=True))
            # A folder of our own also because torch does not tell code for all sizes from code that was
            # compiled without the first of these settings.
            if self._cache_folder is not None:
                settings.enter_context(_variable(_CACHE_VARIABLE, str(self._cache_folder)))
            self._is_warming_up = True
            try:
                yield
            finally:
                self._is_warming_up = False

    def backend(self, name: str) -> Backend:
        """For torch.compile: compiles the whole graph, under that name."""

        def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
            return self.compile(name, graph, inputs)

        return compile_graph

    def compile(self, name: str, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        """The graph as machine code.

        Args:
            name: for the count.
            graph: traced by torch.compile, or a part of one.
            inputs: what it was traced with.
        """
        from torch._dynamo.utils import counters

        if not self._is_warming_up:
            self.num_refused += 1
            logger.warning("%s: a step that the compiled code does not fit; it runs uncompiled", name)
            uncompiled: CompiledGraph = graph.forward
            return uncompiled
        misses, begin = counters["inductor"]["fxgraph_cache_miss"], time.perf_counter()
        compiled: CompiledGraph = torch._inductor.compile(graph, list(inputs))
        seconds = time.perf_counter() - begin
        is_new = counters["inductor"]["fxgraph_cache_miss"] > misses
        self.compilations.append(Compilation(name, seconds, not is_new))
        return compiled


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable, the only way to tell inductor its folder, and puts it back."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
