"""One writer and several readers: each sees all, and the slowest bounds the writer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ipc.programs.checked_frames import FrameMaker

from streamserve.ipc.broadcast import BroadcastReader, BroadcastWriter, broadcast_bytes, format_broadcast
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.segment import Segment

WAIT_S = 120


class Broadcast:
    """A writer and its readers in one process."""

    def __init__(self, resources: ExitStack, capacity: int, num_readers: int) -> None:
        self.segment = resources.enter_context(
            Segment.create("test-broadcast", broadcast_bytes(capacity, num_readers))
        )
        format_broadcast(self.segment.view, capacity, num_readers)
        self.bells = [resources.enter_context(Doorbell.create()) for _ in range(num_readers)]
        self.space_bell = resources.enter_context(Doorbell.create())
        self.writer = BroadcastWriter(self.segment.view, self.bells)
        self.readers = [
            BroadcastReader(self.segment.view, index, self.space_bell) for index in range(num_readers)
        ]


@contextmanager
def broadcast(capacity: int, num_readers: int) -> Iterator[Broadcast]:
    with ExitStack() as resources:
        yield Broadcast(resources, capacity, num_readers)


def drain(reader: BroadcastReader) -> list[bytes]:
    found = [bytes(payload) for _, payload in reader.read()]
    reader.release()
    return found


def test_every_reader_gets_every_message() -> None:
    with broadcast(1024, 3) as ring:
        for number in range(4):
            assert ring.writer.try_push(number + 1, [bytes([number])])
        for reader in ring.readers:
            assert drain(reader) == [b"\0", b"\1", b"\2", b"\3"]


def test_the_slowest_reader_bounds_the_writer() -> None:
    with broadcast(64, 2) as ring:
        quick, slow = ring.readers
        pushed = 0
        for _ in range(10):
            pushed += ring.writer.try_push(1, [bytes(8)])
            drain(quick)
        assert pushed == 4
        slow.read(1)
        slow.release()
        assert ring.writer.try_push(1, [bytes(8)])
        assert not ring.writer.try_push(1, [bytes(8)])
        assert len(drain(slow)) == 4


def test_the_writer_waits_for_the_slowest() -> None:
    with broadcast(64, 2) as ring:
        quick, slow = ring.readers
        while ring.writer.try_push(1, [bytes(8)]):
            pass
        assert ring.writer.arm_space()
        drain(quick)
        assert not ring.space_bell.wait(0)
        drain(slow)
        assert ring.space_bell.wait(0)


def test_only_those_who_sleep_are_rung() -> None:
    with broadcast(1024, 3) as ring:
        assert ring.readers[1].arm()
        assert ring.readers[2].arm()
        ring.readers[2].disarm()
        ring.writer.try_push(1, [b""])
        assert [bell.wait(0) for bell in ring.bells] == [False, True, False]


def test_long_messages_reach_every_reader() -> None:
    message = bytes(range(256)) * 20
    with broadcast(256, 2) as ring:
        push = ring.writer.begin(1, [message])
        found: list[list[bytes]] = [[], []]
        while not push.advance():
            for index, reader in enumerate(ring.readers):
                found[index] += drain(reader)
        for index, reader in enumerate(ring.readers):
            found[index] += drain(reader)
        assert found == [[message], [message]]


def test_readers_are_numbered_from_zero() -> None:
    with broadcast(64, 2) as ring, pytest.raises(ValueError, match="no reader 2"):
        BroadcastReader(ring.segment.view, 2, None)


def test_a_bell_for_each_reader() -> None:
    with broadcast(64, 2) as ring, pytest.raises(ValueError, match="2 readers"):
        BroadcastWriter(ring.segment.view, ring.bells[:1])


actions = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 120)),
    st.tuples(st.sampled_from(["read", "release"]), st.integers(0, 2)),
)


@settings(max_examples=150, deadline=None)
@given(bits=st.integers(6, 9), num_readers=st.integers(1, 3), steps=st.lists(actions, max_size=120))
def test_readers_agree_with_a_list_whatever_the_order(
    bits: int, num_readers: int, steps: list[tuple[str, int]]
) -> None:
    sent: list[bytes] = []
    seen = [0] * num_readers
    with broadcast(1 << bits, num_readers) as ring:
        for action, number in steps:
            if action == "push":
                message = bytes([len(sent) % 256]) * min(number, ring.writer.max_message)
                if ring.writer.try_push(1, [message]):
                    sent.append(message)
                else:
                    assert ring.writer.arm_space()
                    ring.writer.disarm_space()
                continue
            index = number % num_readers
            if action == "release":
                ring.readers[index].release()
                continue
            for _, payload in ring.readers[index].read(3):
                assert payload == sent[seen[index]]
                seen[index] += 1
        for index, reader in enumerate(ring.readers):
            assert drain(reader) == sent[seen[index] :]
        assert ring.writer.free_bytes == 1 << bits


def test_readers_in_other_processes_lose_nothing(spawn) -> None:
    count, num_readers = 50_000, 2
    with broadcast(4096, num_readers) as ring:
        shared = [ring.segment.fd, ring.space_bell.fileno()]
        children = [
            spawn("read_broadcast.py", [shared[0], bell.fileno(), shared[1]], index, count)
            for index, bell in enumerate(ring.bells)
        ]
        frames = FrameMaker(0, 0, 40)
        for _ in range(count):
            parts = frames.next()
            while not ring.writer.try_push(1, parts):
                if ring.writer.arm_space():
                    assert ring.space_bell.wait(WAIT_S), "a wake-up was lost"
                ring.writer.disarm_space()
        assert [child.wait(WAIT_S) for child in children] == [0, 0]
