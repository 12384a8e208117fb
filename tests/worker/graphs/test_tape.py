"""The emulated graph does what a CUDA graph does: memory and numbers as they were, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from streamserve.worker.graphs.graph import GraphError
from streamserve.worker.graphs.tape import TapeGraph

pytestmark = pytest.mark.torch


def captured(work: Callable[[], object]) -> TapeGraph:
    graph = TapeGraph()
    with torch.inference_mode():
        graph.begin()
        work()
        graph.end()
    return graph


def replay(graph: TapeGraph) -> None:
    with torch.inference_mode():
        graph.replay()


def test_it_runs_again_on_what_is_in_the_same_memory() -> None:
    source, result, weight = torch.randn(3, 8), torch.zeros(3, 8), torch.randn(8, 8)

    def work() -> None:
        normed = rms_norm(source, (8,), weight[0], 1e-6)
        first, second = linear(normed, weight).chunk(2, -1)
        joined = torch.cat((second, first), -1)
        joined[1:].mul_(2.0)
        result.copy_(joined.add_(source))

    graph = captured(work)
    for _ in range(3):
        source.normal_()
        result.zero_()
        replay(graph)
        from_graph = result.clone()
        work()
        assert torch.equal(from_graph, result)
        assert from_graph.abs().sum() > 0


def test_attention_and_views_of_its_result() -> None:
    q, result = torch.randn(1, 2, 5, 4), torch.zeros(5, 8)
    graph = captured(
        lambda: result.copy_(
            scaled_dot_product_attention(q, q, q, is_causal=True)[0].transpose(0, 1).flatten(1)
        )
    )
    q.normal_()
    replay(graph)
    expected = scaled_dot_product_attention(q, q, q, is_causal=True)[0].transpose(0, 1).flatten(1)
    assert torch.equal(result, expected)


def test_python_does_not_run_again() -> None:
    """Which memory it is and every host number stay as they were."""
    holder, result = {"x": torch.ones(2), "times": 3}, torch.zeros(2)
    first = holder["x"]
    graph = captured(lambda: result.copy_(holder["x"] * holder["times"]))
    holder |= {"x": torch.full((2,), 100.0), "times": 1000}
    first.fill_(2.0)
    replay(graph)
    assert result.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nothing_in_the_pool_outlives_a_replay(dtype: torch.dtype) -> None:
    source = torch.ones(4, dtype=dtype)
    kept: list[torch.Tensor] = []

    def work() -> None:
        doubled = source * 2
        kept.extend((doubled, doubled[1:], doubled.argmax().view(1), torch.empty(3, dtype=torch.int32)))

    graph = captured(work)
    for _ in range(2):
        floats, view, longs, ints = kept
        assert floats.isnan().all()
        assert view.isnan().all()
        assert (longs > 1 << 40).all()
        assert (ints > 1 << 30).all()
        replay(graph)
    assert torch.equal(source, torch.ones(4, dtype=dtype))


def test_memory_from_before_is_left_alone() -> None:
    """Also where the work writes into it and hands it on."""
    room = torch.zeros(4)
    other = torch.arange(4.0)
    graph = captured(lambda: torch.add(other, 1.0, out=room).view(2, 2).mul_(2.0))
    room.zero_()
    replay(graph)
    assert room.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[0].item(),
        lambda x: float(x[0]),
        lambda x: bool(x[0] > 0),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1.0]),
        lambda x: x.new_tensor([1.0]),
    ],
)
def test_what_needs_the_host_is_an_error(ask: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3)
    graph = TapeGraph()
    with torch.inference_mode():
        graph.begin()
        with pytest.raises(GraphError, match=r"aten::.* needs the host"):
            ask(x)
        graph.end()
        ask(x)
