"""Which graph a step runs from: against the rules read anew, and against the page that tells them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.errors import ConfigError
from streamserve.worker.graphs.descriptor import (
    BatchDescriptor,
    checked_capture_sizes,
    default_capture_sizes,
)
from streamserve.worker.graphs.dispatcher import Dispatch, GraphDispatcher
from streamserve.worker.graphs.mode import CUDAGraphMode, GraphSupport, RuntimeMode, lower

PAGE = Path(__file__).parents[3] / "docs/graphs.md"
SIZES = (1, 2, 4, 8, 16, 32)
MAX_NUM_SEQS = 8


def by_the_rules(
    mode: str, support: int, sizes: set[int], max_num_seqs: int, query_len: int, step: tuple[int, int, bool]
) -> tuple[str, int, int | None, bool]:
    """(runtime mode, tokens, requests, uniform) of the best of all graphs there could be.

    Written from the rules, not from the code: every graph that the mode and the backend allow is considered
    for the step, and the best one that can hold it is taken.
    """
    num_tokens, num_reqs, uniform = step
    takes_decodes = support >= (1 if query_len == 1 else 2)
    takes_anything = support == 3
    full_for_decodes = mode in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE") and takes_decodes
    full_for_all = mode == "FULL" and takes_anything
    piecewise = (
        mode in ("PIECEWISE", "FULL_AND_PIECEWISE")
        or (mode == "FULL" and not takes_anything)
        or (mode == "FULL_DECODE_ONLY" and not takes_decodes)
    )
    graphs: list[tuple[int, str, int, int | None, bool]] = []
    for size in sizes:
        if full_for_all:
            graphs.append((1, "FULL", size, min(size, max_num_seqs), False))
        elif full_for_decodes and size % query_len == 0 and size <= max_num_seqs * query_len:
            graphs.append((0, "FULL", size, size // query_len, True))
        if piecewise:
            graphs.append((1, "PIECEWISE", size, None, False))
    fitting = [
        (rank, size, name, reqs, only_uniform)
        for rank, name, size, reqs, only_uniform in graphs
        if size >= num_tokens and (reqs is None or reqs >= num_reqs) and (uniform or not only_uniform)
    ]
    if not fitting:
        return "NONE", num_tokens, num_reqs, uniform
    _, size, name, reqs, only_uniform = min(fitting, key=lambda graph: graph[:2])
    return name, size, reqs, only_uniform


@st.composite
def situations(draw: st.DrawFn) -> tuple[set[int], int, int, tuple[int, int, bool]]:
    """Capture sizes, seats, tokens of a decode, and a step that can be."""
    query_len = draw(st.integers(1, 4))
    max_num_seqs = draw(st.integers(1, 40))
    sizes = draw(st.sets(st.integers(1, 80), max_size=12))
    num_reqs = draw(st.integers(1, max_num_seqs))
    if draw(st.booleans()):
        return sizes, max_num_seqs, query_len, (num_reqs * query_len, num_reqs, True)
    return sizes, max_num_seqs, query_len, (draw(st.integers(num_reqs, 100)), num_reqs, False)


@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("support", GraphSupport)
@given(situation=situations())
def test_dispatch_is_what_the_rules_say(
    mode: CUDAGraphMode,
    support: GraphSupport,
    situation: tuple[set[int], int, int, tuple[int, int, bool]],
) -> None:
    sizes, max_num_seqs, query_len, step = situation
    dispatcher = GraphDispatcher(lower(mode, support, query_len), sizes, max_num_seqs, query_len)
    found = dispatcher.dispatch(BatchDescriptor(*step))
    expected = by_the_rules(mode.name, support, sizes, max_num_seqs, query_len, step)
    assert found == Dispatch(RuntimeMode[expected[0]], BatchDescriptor(*expected[1:]))
    if found.mode is not RuntimeMode.NONE:
        assert found in dispatcher.captures()
        assert found.padded.num_tokens >= step[0]


@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("support", GraphSupport)
def test_what_is_captured_in_which_order(mode: CUDAGraphMode, support: GraphSupport) -> None:
    """Piecewise first, largest first, each once; nothing that the backend cannot do; nothing never used."""
    dispatcher = GraphDispatcher(lower(mode, support), SIZES, MAX_NUM_SEQS)
    captures = dispatcher.captures()
    assert len(set(captures)) == len(captures)
    order = [(graph.mode, -graph.padded.num_tokens) for graph in captures]
    assert order == sorted(order)
    full = [graph for graph in captures if graph.mode is RuntimeMode.FULL]
    assert not full or support >= (1 if all(graph.padded.uniform for graph in full) else 3)
    steps = [BatchDescriptor(n, n, True) for n in range(1, MAX_NUM_SEQS + 1)]
    steps += [BatchDescriptor(n, min(n, 3), False) for n in range(1, 40)]
    assert {dispatcher.dispatch(step) for step in steps} >= set(captures)


def shown(dispatch: Dispatch) -> str:
    if dispatch.mode is RuntimeMode.NONE:
        return "eager"
    reqs = "" if dispatch.padded.num_reqs is None else f" × {dispatch.padded.num_reqs}"
    return f"{dispatch.mode.name} {dispatch.padded.num_tokens}{reqs}"


def test_the_page_tells_the_truth() -> None:
    """The table of docs/graphs.md, row by row."""
    rows = []
    for mode in CUDAGraphMode:
        for support in GraphSupport:
            lowered = lower(mode, support)
            dispatcher = GraphDispatcher(lowered, SIZES, MAX_NUM_SEQS)
            steps = (
                BatchDescriptor(5, 5, True),
                BatchDescriptor(30, 4, False),
                BatchDescriptor(40, 4, False),
            )
            cells = [f"`{mode.name}`", f"`{support.name}`", f"`{lowered.name}`"]
            cells += [shown(dispatcher.dispatch(step)) for step in steps]
            rows.append("| " + " | ".join(cells) + " |")
    written = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert written == rows


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 512), (1, 2)),
        ((8, 48), (1, 2, 4, 8, 16)),
        ((10, 2048), (1, 2, 4, 8, 10, 16, 20)),
        ((64, 30), (1, 2, 4, 8, 16, 24, 30)),
        ((5, 100, 3), (1, 2, 3, 4, 6, 8, 12, 15, 16, 24, 30)),
        ((256, 8192), (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
    ],
)
def test_default_sizes(arguments: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert default_capture_sizes(*arguments) == expected


@given(st.integers(1, 600), st.integers(1, 600), st.integers(1, 4))
def test_default_sizes_hold_a_full_house(max_num_seqs: int, slack: int, query_len: int) -> None:
    """A step in which every seat decodes has a graph without padding, unless it is larger than all graphs."""
    full_house = max_num_seqs * query_len
    sizes = default_capture_sizes(max_num_seqs, full_house + slack, query_len)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] <= min(512, full_house + slack)
    assert full_house > 512 or full_house in sizes


def test_sizes_that_no_step_can_have() -> None:
    assert checked_capture_sizes((8, 1, 8, 4), 8) == (1, 4, 8)
    assert checked_capture_sizes((), 8) == ()
    with pytest.raises(ConfigError, match=r"--cudagraph-capture-sizes 0: .* at least one"):
        checked_capture_sizes((0, 4), 8)
    with pytest.raises(ConfigError, match=r"--cudagraph-capture-sizes 9: .* at most 8 tokens"):
        checked_capture_sizes((4, 9), 8)


def test_the_rules_need_no_torch() -> None:
    code = "import sys, streamserve.worker.graphs.dispatcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
