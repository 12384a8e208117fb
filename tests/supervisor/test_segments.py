"""What all processes share."""

from __future__ import annotations

import contextlib
import json

import pytest

from streamserve.frontend.metrics import Layout, Row
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.layout import HEADER_BYTES
from streamserve.ipc.notice import Notice
from streamserve.ipc.ring import RingReader, RingWriter
from streamserve.ipc.segment import Segment
from streamserve.messages import Kind, decode_handover, epoch_of
from streamserve.supervisor.segments import REQUEST_RING_BYTES, SharedState

LAYOUT = Layout()


def test_progress_is_there_to_be_read() -> None:
    with contextlib.closing(SharedState(1, LAYOUT)) as shared, Notice.attach(shared.progress.fd) as progress:
        assert progress.read() == b""
        shared.report_progress("loading weights", 0.25)
        assert json.loads(progress.read()) == {"stage": "loading weights", "fraction": 0.25}
        shared.report_progress("ü" * 10_000, 1.0)
        assert json.loads(progress.read())["stage"] == "ü" * 200


def test_metrics_have_a_row_for_each() -> None:
    with contextlib.closing(SharedState(2, LAYOUT)) as shared, Segment.attach(shared.metrics.fd) as metrics:
        assert bytes(metrics.view) == bytes(2 * LAYOUT.row_bytes)


class Ends:
    """The ends of a channel's request ring, as engine and frontend have them."""

    def __init__(self, shared: SharedState, index: int) -> None:
        channel = shared.channels[index]
        self.engine_bell = Doorbell.attach(channel.engine_bell)
        segment = Segment.attach(channel.request_ring)
        self.reader = RingReader(segment.view, Doorbell.attach(channel.frontend_bell))
        self.writer = RingWriter(segment.view, self.engine_bell)

    def successor(self, shared: SharedState, index: int) -> RingWriter:
        return RingWriter(Segment.attach(shared.channels[index].request_ring).view, self.engine_bell)

    def fill(self) -> int:
        """Leaves no room at all; how many frames that took."""
        frame = [bytes(REQUEST_RING_BYTES // 8 - HEADER_BYTES)]
        return sum(iter(lambda: self.writer.try_push(Kind.ADD, frame), False))

    def read(self) -> list[tuple[int, bytes]]:
        found = [(kind, bytes(payload)) for kind, payload in self.reader.read()]
        self.reader.release()
        return found


def test_the_engine_learns_where_the_frames_of_the_dead_one_end() -> None:
    with contextlib.closing(SharedState(2, LAYOUT)) as shared:
        ends = Ends(shared, 1)
        assert ends.writer.try_push(Kind.ABORT, [b"old"])
        assert shared.hand_over(1, epoch=3)
        assert ends.successor(shared, 1).try_push(Kind.ABORT, [b"new"])
        (_, old), (kind, handover), (_, new) = ends.read()
        assert (old, new) == (b"old", b"new")
        assert kind == Kind.HANDOVER
        assert (epoch_of(handover), decode_handover(handover)) == (3, 1)
        assert [channel.incarnation for channel in shared.channels] == [0, 1]
        assert shared.hand_over(1, epoch=3)
        ((_, handover),) = ends.read()
        assert decode_handover(handover) == 2


@pytest.mark.parametrize("has_room", [True, False])
def test_an_engine_that_a_dying_frontend_was_about_to_wake_is_woken(has_room: bool) -> None:
    with contextlib.closing(SharedState(1, LAYOUT)) as shared:
        ends = Ends(shared, 0)
        if not has_room:
            ends.fill()
        # It had taken the sign that the engine sleeps away, and died before it rang.
        ends.reader.disarm()
        ends.engine_bell.clear()
        assert shared.hand_over(0, epoch=1) == has_room
        assert ends.engine_bell.wait(0)


def test_a_full_ring_is_handed_over_when_the_engine_has_read_on() -> None:
    with contextlib.closing(SharedState(1, LAYOUT)) as shared:
        ends = Ends(shared, 0)
        num_frames = ends.fill()
        assert not shared.hand_over(0, epoch=1)
        assert shared.channels[0].incarnation == 0
        assert [kind for kind, _ in ends.read()] == [Kind.ADD] * num_frames
        assert shared.hand_over(0, epoch=1)
        assert [kind for kind, _ in ends.read()] == [Kind.HANDOVER]
        assert shared.channels[0].incarnation == 1


def test_counters_go_on_and_gauges_begin_anew() -> None:
    with contextlib.closing(SharedState(2, LAYOUT)) as shared:
        size = LAYOUT.row_bytes
        rows = [Row(LAYOUT, shared.metrics.view[at : at + size]) for at in (0, size)]
        for row in rows:
            row.counter("streamserve:streams_open").set(5)
            row.counter("vllm:generation_tokens").add(100)
        assert shared.hand_over(1, epoch=1)
        restarts = [row.counter("streamserve:frontend_restarts").value for row in rows]
        assert restarts == [0, 1]
        assert [row.counter("streamserve:streams_open").value for row in rows] == [5, 0]
        assert [row.counter("vllm:generation_tokens").value for row in rows] == [100, 100]
