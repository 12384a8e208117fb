"""The outbox keeps order, merges by stream when the ring is full, and loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.engine.outbox import Outbox
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment
from streamserve.messages import Finish, Kind, StepTokens, decode_call, decode_json, decode_step

CAPACITY = 4096


class Wire:
    """An outbox on a small real ring, and its reader."""

    def __init__(self) -> None:
        self.segment = Segment.create("test-outbox", ring_bytes(CAPACITY))
        format_ring(self.segment.view, CAPACITY)
        self.bells = [Doorbell.create(), Doorbell.create()]
        self.outbox = Outbox(RingWriter(self.segment.view, self.bells[0]), epoch=7)
        self.reader = RingReader(self.segment.view, self.bells[1])
        self.received: dict[int, list[int]] = {}
        self.finished: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.frames = 0

    def read(self) -> None:
        for kind, payload in self.reader.read():
            if kind == Kind.STEP:
                self._take(decode_step(payload))
                self.frames += 1
        self.reader.release()

    def _take(self, step: StepTokens) -> None:
        at = 0
        for row, stream in enumerate(step.streams.tolist()):
            count = int(step.counts[row])
            assert stream not in self.finished, "tokens after the end of a stream"
            self.received.setdefault(stream, []).extend(step.tokens[at : at + count].tolist())
            at += count
            if step.finish[row]:
                self.finished[stream] = int(step.finish[row])
            if step.cached is not None and step.cached[row]:
                self.cached[stream] = int(step.cached[row])

    def close(self) -> None:
        self.segment.close()
        for bell in self.bells:
            bell.close()


def step_tokens(rows: list[tuple[int, int, int]], cached: list[int] | None = None) -> StepTokens:
    """One token a row: (stream, token, finish)."""
    return StepTokens(
        step=1,
        streams=np.array([row[0] for row in rows], dtype=np.uint64),
        counts=np.ones(len(rows), dtype=np.uint32),
        finish=np.array([row[2] for row in rows], dtype=np.uint8),
        tokens=np.array([row[1] for row in rows], dtype=np.int32),
        cached=None if cached is None else np.array(cached, dtype=np.uint32),
    )


@pytest.fixture
def wire():
    wire = Wire()
    yield wire
    wire.close()


def test_a_step_is_one_frame(wire):
    wire.outbox.step(step_tokens([(1, 10, 0), (2, 20, Finish.STOP)], cached=[0, 16]))
    wire.read()
    assert wire.received == {1: [10], 2: [20]}
    assert wire.finished == {2: Finish.STOP}
    assert wire.cached == {2: 16}
    assert wire.frames == 1


def test_a_full_ring_merges_and_loses_nothing(wire):
    streams = range(20)
    for token in range(200):
        wire.outbox.step(step_tokens([(s, token, Finish.LENGTH if token == 199 else 0) for s in streams]))
    assert wire.outbox.has_backlog
    while True:
        done = wire.outbox.flush()
        wire.read()
        if done:
            break
    wire.read()
    assert wire.received == {s: list(range(200)) for s in streams}
    assert set(wire.finished) == set(streams)
    assert wire.frames < 200, "what waited was not merged"


def test_control_frames_wait_their_turn(wire):
    while not wire.outbox.has_backlog:
        wire.outbox.step(step_tokens([(1, 1, 0)]))
    wire.outbox.reply(5, {"ok": True})
    wire.outbox.hello({"a": 1})
    seen = []
    while True:
        done = wire.outbox.flush()
        for kind, payload in wire.reader.read():
            if kind == Kind.REPLY:
                seen.append(decode_call(payload))
            elif kind == Kind.HELLO:
                seen.append(decode_json(payload))
        wire.reader.release()
        if done and len(seen) == 2:
            break
    assert seen == [(5, {"ok": True}), {"a": 1}]


def test_the_bell_rings_when_room_appears(wire):
    while not wire.outbox.has_backlog:
        wire.outbox.step(step_tokens([(1, 1, 0)]))
    assert wire.outbox.wait_for_room()
    wire.read()
    assert wire.bells[1].wait(60)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(st.just("read"), st.just("flush"), st.integers(min_value=1, max_value=60)), max_size=120
    )
)
def test_any_interleaving_delivers_every_token_in_order(actions):
    wire = Wire()
    try:
        sent: dict[int, list[int]] = {}
        for number, action in enumerate(actions):
            if action == "read":
                wire.read()
            elif action == "flush":
                wire.outbox.flush()
            else:
                wire.outbox.step(step_tokens([(s, number, 0) for s in range(action)]))
                for stream in range(action):
                    sent.setdefault(stream, []).append(number)
        while not wire.outbox.flush():
            wire.read()
        wire.read()
        assert wire.received == sent
    finally:
        wire.close()
