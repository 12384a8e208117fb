"""The link to CUDA, on a stand-in that notes what it is asked for: no GPU is needed to see the order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch

from streamserve.worker.link import CudaLink, HostLink, open_link
from streamserve.worker.staging import StagedArray

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


class Cuda:
    """Stands in for `torch.cuda`: tensors are on the CPU, and time is what the test says.

    Attributes:
        log: (what, stream or event), in their order.
        now_ms: on the device.
        mode: of sync debugging.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.now_ms = 0.0
        self.mode = 0
        self.streams = ["main"]

    @property
    def current(self) -> str:
        return self.streams[-1]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.name = "side"

        def wait_stream(self, other: str) -> None:
            cuda.log.append((f"{self.name} waits for", other))

    class Event:
        def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
            assert enable_timing
            assert blocking
            self.at_ms = 0.0
            self.number = 0

        def record(self) -> None:
            self.number = sum(what.endswith("records") for what, _ in cuda.log)
            cuda.log.append((f"{cuda.current} records", self.number))
            self.at_ms = cuda.now_ms

        def synchronize(self) -> None:
            cuda.log.append(("host waits for", self.number))

        def elapsed_time(self, later: Event) -> float:
            return later.at_ms - self.at_ms

    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        cuda.streams.append(stream.name)
        yield
        cuda.streams.pop()

    def set_mode(mode: int | str) -> None:
        cuda.log.append(("sync debug mode", mode))
        cuda.mode = mode  # type: ignore[assignment]

    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device: cuda.current,
        "get_sync_debug_mode": lambda: cuda.mode,
        "set_sync_debug_mode": set_mode,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        "streamserve.worker.link._pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype)
    )
    return cuda


def test_a_step_waits_for_the_one_before_the_last(cuda: Cuda) -> None:
    """Each step has an event at its end."""
    link = CudaLink(CPU)
    ends = []
    for _ in range(5):
        with link.step():
            pass
        spans = [span for span in link._spans if span is not None]
        ends.append(max(span.end.number for span in spans))
    waited = [number for what, number in cuda.log if what == "host waits for"]
    assert waited == ends[:3]


def test_memory_is_written_in_turns(cuda: Cuda) -> None:
    link = CudaLink(CPU)
    array = StagedArray(4, torch.int64, link)
    seen = []
    for step in range(4):
        with link.step():
            host = array.host
            host[:] = step
            seen.append(host.ctypes.data)
            assert array.publish(3).tolist() == [step] * 3
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert array.device.data_ptr() not in seen


def test_results_are_copied_on_a_stream_of_their_own_and_kept_until_then(cuda: Cuda) -> None:
    link = CudaLink(CPU)
    with link.step():
        source = torch.arange(3)
        alive = weakref.ref(source)
        cuda.log.clear()
        fetched = link.fetch([source])
        event = cuda.log[-1][1]
        assert cuda.log == [("side waits for", "main"), ("side records", event)]
        del source
    assert alive() is not None
    cuda.log.clear()
    (array,) = fetched.wait()
    assert cuda.log == [("host waits for", event)]
    assert array.tolist() == [0, 1, 2]
    assert alive() is None


def test_nothing_to_fetch_is_not_waited_for(cuda: Cuda) -> None:
    link = CudaLink(CPU)
    with link.step():
        fetched = link.fetch([])
    cuda.log.clear()
    assert fetched.wait() == []
    assert cuda.log == []


def test_what_is_uploaded_may_be_written_at_once(cuda: Cuda) -> None:
    link = CudaLink(CPU)
    array = np.arange(4, dtype=np.int32)
    array.flags.writeable = False
    uploaded = link.upload(array)
    array.flags.writeable = True
    array[:] = 9
    assert uploaded.tolist() == [0, 1, 2, 3]


def test_waiting_within_a_step_is_an_error_if_asked_for(cuda: Cuda) -> None:
    link = open_link(torch.device("cuda"), forbids_sync=True)
    with suppress(ZeroDivisionError), link.step():
        assert cuda.mode == "error"
        raise ZeroDivisionError
    assert cuda.mode == 0
    with link.allows_sync(), link.step():
        assert cuda.mode == 0
    with link.step():
        assert cuda.mode == "error"
    with CudaLink(CPU).step():
        assert cuda.mode == 0


def test_gaps_between_steps_that_overlap(cuda: Cuda) -> None:
    """The second's forward begins 0.25 ms after the first has ended, though the device had no more to do than
    to wait for it; later ones are launched when all has been read, and one has nothing to run.
    """
    link = CudaLink(CPU)
    assert link.gaps is not None

    def step(begin_ms: float, end_ms: float) -> Any:
        with link.step():
            cuda.now_ms = begin_ms
            link.forward_begins()
            cuda.now_ms = end_ms
            return link.fetch([torch.zeros(1)])

    first = step(0.0, 10.0)
    second = step(10.25, 20.0)
    with link.step():
        pass
    first.wait()
    second.wait()
    step(500.0, 510.0).wait()
    step(600.0, 610.0).wait()
    step(700.0, 710.0).wait()
    assert (link.gaps.count, link.gaps.total_ns) == (1, 250_000)


def test_on_a_cpu_both_sides_are_the_same_memory() -> None:
    link = open_link(CPU)
    assert isinstance(link, HostLink)
    assert link.gaps is None
    array = StagedArray(4, torch.int64, link)
    with link.step():
        array.host[:] = 7
    assert array.publish(2).tolist() == [7, 7]
    assert array.device.data_ptr() == array.host.ctypes.data
    tensor = torch.arange(3)
    (fetched,) = link.fetch([tensor]).wait()
    assert fetched.ctypes.data == tensor.data_ptr()
    fixed = np.arange(3)
    fixed.flags.writeable = False
    assert link.upload(fixed).tolist() == [0, 1, 2]
