"""A forward cut into graphs, on the emulated device and in the order in which CUDA is asked for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from streamserve.worker.graphs.cuda import CudaGraphs
from streamserve.worker.graphs.graph import GraphError
from streamserve.worker.graphs.segments import ForwardRecorder
from streamserve.worker.graphs.tape import TapeGraphs

pytestmark = pytest.mark.torch


class Cuda:
    """Notes what torch.cuda is asked for, in order, and whether it may be asked for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.stream: str | None = None
        self.capturing: Any = None
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "capture stream")
        monkeypatch.setattr(torch.cuda, "stream", self.on_stream)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: CudaGraph(self))

    @contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        self.stream = stream
        yield
        self.stream = None

    def synchronize(self, device: torch.device) -> None:
        assert self.capturing is None
        self.calls.append("synchronize")


class CudaGraph:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert pool == (0, 1)
        assert capture_error_mode == "thread_local"
        assert self.cuda.stream == "capture stream"
        assert self.cuda.capturing is None
        assert not gc.isenabled()
        self.cuda.capturing = self
        self.cuda.calls.append("begin")

    def capture_end(self) -> None:
        assert self.cuda.capturing is self
        self.cuda.capturing = None
        self.cuda.calls.append("end")

    def replay(self) -> None:
        assert self.cuda.stream is None
        self.cuda.calls.append("replay")


def forward(recorder: ForwardRecorder, source: torch.Tensor, room: torch.Tensor, num_layers: int) -> None:
    room.copy_(source)
    for layer in range(num_layers):
        room.mul_(2.0)
        recorder.break_at(layer)
        room.add_(1.0)


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_breaks_are_where_they_were(num_layers: int) -> None:
    recorder = ForwardRecorder(TapeGraphs().new_graph)
    source, room = torch.zeros(2), torch.zeros(2)
    forward(recorder, source, room, num_layers)
    captured = recorder.record(lambda: forward(recorder, source, room, num_layers), num_layers)
    assert len(captured.graphs) == num_layers + 1
    source.fill_(1.0)
    seen: list[tuple[int, float]] = []
    captured.replay(lambda layer: seen.append((layer, float(room[0]))))
    forward(recorder, source, torch.zeros(2), num_layers)
    assert seen == [(0, 2.0), (1, 6.0), (2, 14.0)][:num_layers]
    assert float(room[0]) == 2.0 ** (num_layers + 1) - 1


def test_what_an_attention_writes_is_seen_behind_it() -> None:
    recorder = ForwardRecorder(TapeGraphs().new_graph)
    source, room = torch.zeros(2), torch.zeros(2)
    captured = recorder.record(lambda: forward(recorder, source, room, 1), 1)
    captured.replay(lambda layer: room.fill_(41.0))
    assert float(room[0]) == 42.0


@pytest.mark.parametrize(("num_layers", "expected"), [(2, 3), (3, 2), (0, 1)])
def test_too_few_and_too_many_breaks(num_layers: int, expected: int) -> None:
    recorder = ForwardRecorder(TapeGraphs().new_graph)
    source, room = torch.zeros(2), torch.zeros(2)
    with pytest.raises(GraphError, match=f"{num_layers} breaks .* should have {expected}"):
        recorder.record(lambda: forward(recorder, source, room, num_layers), expected)


def test_cuda_is_asked_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    device = CudaGraphs(torch.device("cpu"))
    recorder = ForwardRecorder(device.new_graph)
    source, room = torch.zeros(2), torch.zeros(2)
    with device.capturing():
        forward(recorder, source, room, 2)
        device.synchronize()
        captured = recorder.record(lambda: forward(recorder, source, room, 2), 2)
    assert cuda.calls == ["synchronize", "synchronize", *["begin", "end"] * 3, "synchronize"]
    assert gc.isenabled()
    cuda.calls.clear()
    captured.replay(lambda layer: cuda.calls.append(f"attention {layer}"))
    assert cuda.calls == ["replay", "attention 0", "replay", "attention 1", "replay"]


@pytest.mark.parametrize("num_begun", [1, 2])
def test_a_capture_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch, num_begun: int) -> None:
    """The device captures no longer, and the error is the one that was."""
    cuda = Cuda(monkeypatch)
    device = CudaGraphs(torch.device("cpu"))
    recorder = ForwardRecorder(device.new_graph)

    def fail() -> None:
        if num_begun == 2:
            recorder.break_at(0)
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"), device.capturing():
        recorder.record(fail, 1)
    assert cuda.capturing is None
    assert cuda.calls[1:-1] == ["begin", "end"] * num_begun
    assert gc.isenabled()
