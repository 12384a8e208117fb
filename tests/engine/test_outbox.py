"""The outbox keeps order, merges by stream when the ring is full, and loses nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.engine.outbox import Outbox
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment
from streamserve.messages import (
    Finish,
    Kind,
    Logprobs,
    StepTokens,
    decode_call,
    decode_json,
    decode_prompt_logprobs,
    decode_step,
)

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
        self.prompts: dict[int, list[int]] = {}
        self.frames = 0
        self.longest = 0

    def read(self) -> None:
        for kind, payload in self.reader.read():
            self.longest = max(self.longest, len(payload))
            if kind == Kind.STEP:
                self._take(decode_step(payload))
                self.frames += 1
            elif kind == Kind.PROMPT_LOGPROBS:
                self._take_prompt(*decode_prompt_logprobs(payload))
        self.reader.release()

    def drain(self) -> None:
        """Reads until nothing waits any more."""
        while not self.outbox.flush():
            self.read()
        self.read()

    def _take_prompt(self, stream: int, start: int, logprobs: Logprobs) -> None:
        assert stream not in self.received, "log probabilities of a prompt after its first token"
        positions = self.prompts.setdefault(stream, [])
        assert start == len(positions) + 1
        positions += logprobs.chosen.astype(int).tolist()
        assert (logprobs.top == logprobs.chosen[:, None]).all()

    def _take(self, step: StepTokens) -> None:
        at = 0
        for row, (stream, count, finish) in enumerate(step.rows()):
            assert stream not in self.finished, "tokens after the end of a stream"
            if step.logprobs is not None:
                self._check_logprobs(
                    stream, np.array(step.tokens[at : at + count]), step.logprobs.rows(slice(at, at + count))
                )
            else:
                assert not asks(stream) or not count
            self.received.setdefault(stream, []).extend(step.tokens[at : at + count].tolist())
            at += count
            if finish:
                self.finished[stream] = finish
            if step.cached is not None and step.cached[row]:
                self.cached[stream] = int(step.cached[row])

    def _check_logprobs(self, stream: int, tokens: np.ndarray, logprobs: Logprobs) -> None:
        num_top = asks(stream)
        assert num_top
        assert logprobs.top.shape[1] >= num_top
        wanted = logprobs_of(stream, tokens, num_top)
        np.testing.assert_array_equal(logprobs.chosen, wanted.chosen)
        np.testing.assert_array_equal(logprobs.rows(slice(None), num_top).top, wanted.top)
        np.testing.assert_array_equal(logprobs.rows(slice(None), num_top).top_ids, wanted.top_ids)

    def close(self) -> None:
        self.segment.close()
        for bell in self.bells:
            bell.close()


def asks(stream: int) -> int | None:
    """How many of the likeliest tokens a stream of these tests wants to know."""
    return stream // 1000 or None


def logprobs_of(stream: int, tokens: np.ndarray, num_top: int, width: int | None = None) -> Logprobs:
    """Numbers that say which stream, token and column they are for."""
    chosen = (stream * 1000 + tokens).astype(np.float32)
    columns = np.arange(width or num_top)
    blank = columns >= num_top
    top_ids = np.where(blank, -1, tokens[:, None] * 100 + columns).astype(np.int32)
    return Logprobs(chosen, top_ids, np.where(blank, np.nan, chosen[:, None] - columns).astype(np.float32))


def prompt_logprobs_of(first: int, count: int, width: int) -> Logprobs:
    positions = np.arange(first, first + count, dtype=np.float32)
    return Logprobs(positions, np.zeros((count, width), np.int32), np.tile(positions[:, None], width))


def step_with_logprobs(rows: list[tuple[int, int, int]]) -> StepTokens:
    """`step_tokens` of streams that all ask."""
    width = max(asks(stream) for stream, _, _ in rows)
    pieces = [logprobs_of(stream, np.array([token]), asks(stream), width) for stream, token, _ in rows]
    return replace(step_tokens(rows), logprobs=Logprobs.join(pieces))


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
    wire.drain()
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
    assert seen == [(5, {"ok": True}), {"a": 1, "incarnation": 0}]


def test_the_bell_rings_when_room_appears(wire):
    while not wire.outbox.has_backlog:
        wire.outbox.step(step_tokens([(1, 1, 0)]))
    assert wire.outbox.wait_for_room()
    wire.read()
    assert wire.bells[1].wait(60)


def test_log_probabilities_go_with_their_tokens(wire):
    wire.outbox.step(step_with_logprobs([(2001, 10, 0), (5001, 20, Finish.STOP)]))
    wire.read()
    assert wire.received == {2001: [10], 5001: [20]}
    assert wire.frames == 1


def test_log_probabilities_are_merged_with_their_tokens(wire):
    """A frame of what waited is for those that asked or for the others, and no longer than the ring takes."""
    plain, asking = range(10), range(3000, 3010)
    for token in range(100):
        finish = Finish.LENGTH if token == 99 else 0
        wire.outbox.step(step_tokens([(stream, token, finish) for stream in plain]))
        wire.outbox.step(step_with_logprobs([(stream, token, finish) for stream in asking]))
    wire.drain()
    assert wire.received == {stream: list(range(100)) for stream in (*plain, *asking)}
    assert set(wire.finished) == {*plain, *asking}
    assert wire.longest <= wire.outbox._writer.max_message
    assert wire.frames < 100


def test_streams_that_ask_for_more_and_for_less_in_one_frame(wire):
    wide, narrow = (20_001, 1, 0), (1001, 2, 0)
    while not wire.outbox.has_backlog:
        wire.outbox.step(step_with_logprobs([narrow]))
    for row in (wide, narrow, wide):
        wire.outbox.step(step_with_logprobs([row]))
    wire.drain()
    assert wire.received[20_001] == [1, 1]
    assert set(wire.received[1001]) == {2}


def test_a_row_longer_than_the_ring_goes_in_fragments(wire):
    stream = 1_000_000
    for token in range(3):
        wire.outbox.step(step_with_logprobs([(stream, token, 0)]))
        wire.outbox.step(step_tokens([(1, token, 0)]))
    assert wire.outbox.has_backlog
    wire.drain()
    assert wire.received == {stream: [0, 1, 2], 1: [0, 1, 2]}
    assert wire.longest > CAPACITY


def test_the_worker_may_use_its_memory_again(wire):
    while not wire.outbox.has_backlog:
        wire.outbox.step(step_tokens([(1, 1, 0)]))
    step = step_with_logprobs([(2001, 10, 0)])
    wire.outbox.step(step)
    step.logprobs.chosen[:] = np.nan
    wire.drain()
    assert wire.received[2001] == [10]


def test_a_prompt_comes_in_parts_that_fit(wire):
    for start in (1, 301):
        wire.outbox.prompt_logprobs(7, start, prompt_logprobs_of(start, 300, 3))
    wire.outbox.step(step_tokens([(7, 1, 0)]))
    wire.drain()
    assert wire.prompts == {7: list(range(1, 601))}
    assert wire.received == {7: [1]}
    assert wire.longest <= wire.outbox._writer.max_message


def test_a_prompt_comes_before_its_first_token_when_the_ring_is_full(wire):
    while not wire.outbox.has_backlog:
        wire.outbox.step(step_tokens([(1, 1, 0)]))
    wire.outbox.prompt_logprobs(7, 1, prompt_logprobs_of(1, 100, 2))
    # Room appears before the token comes: it must not slip past what still waits.
    wire.read()
    wire.outbox.step(step_tokens([(7, 1, 0)]))
    wire.drain()
    assert wire.prompts == {7: list(range(1, 101))}
    assert wire.received[7] == [1]


def test_a_call_longer_than_the_ring_is_answered(wire):
    wire.outbox.reply(3, {"text": "x" * 3 * CAPACITY})
    seen = []
    while not wire.outbox.flush() or not seen:
        seen += [decode_call(payload) for kind, payload in wire.reader.read() if kind == Kind.REPLY]
        wire.reader.release()
    assert seen == [(3, {"text": "x" * 3 * CAPACITY})]


STREAMS = st.lists(st.sampled_from([0, 1, 2, 1001, 1002, 20_001]), min_size=1, unique=True)
ACTIONS = st.one_of(
    st.just("read"), st.just("flush"), st.just("reply"), st.integers(min_value=3, max_value=60), STREAMS
)


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTIONS, min_size=20, max_size=120))
def test_any_interleaving_delivers_every_token_in_order(actions):
    wire = Wire()
    try:
        sent: dict[int, list[int]] = {}
        prompts: dict[int, list[int]] = {}
        for number, action in enumerate(actions):
            if action == "read":
                wire.read()
            elif action == "flush":
                wire.outbox.flush()
            elif action == "reply":
                wire.outbox.reply(number, {"text": "x" * number})
            else:
                streams = list(range(action)) if isinstance(action, int) else action
                for stream in streams:
                    if asks(stream) and stream not in sent:
                        wire.outbox.prompt_logprobs(
                            stream, 1, prompt_logprobs_of(1, number + 1, asks(stream))
                        )
                        prompts[stream] = list(range(1, number + 2))
                    sent.setdefault(stream, []).append(number)
                plain = [(stream, number, 0) for stream in streams if not asks(stream)]
                asking = [(stream, number, 0) for stream in streams if asks(stream)]
                if plain:
                    wire.outbox.step(step_tokens(plain))
                if asking:
                    wire.outbox.step(step_with_logprobs(asking))
        wire.drain()
        assert wire.received == sent
        assert wire.prompts == prompts
    finally:
        wire.close()
