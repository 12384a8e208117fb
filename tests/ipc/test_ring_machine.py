"""The ring against a deque, whatever the order of pushes, reads, releases and new attachments."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import FragmentedPush, RingReader, RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment

Message = tuple[int, bytes]

PATTERN = bytes(range(251)) * 64
kinds = st.integers(1, 0xFFFE)
fractions = st.floats(0, 1)


class RingMachine(RuleBasedStateMachine):
    """The model: `sent` holds what no read has returned yet, `lent` what no release has given back."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: deque[Message] = deque()
        self.lent: list[tuple[Message, memoryview]] = []
        self.push: FragmentedPush | None = None
        self.long_message: Message = (0, b"")
        self.number = 0

    @initialize(bits=st.integers(6, 11))
    def create(self, bits: int) -> None:
        self.capacity = 1 << bits
        self.segment = Segment.create("test-ring", ring_bytes(self.capacity))
        format_ring(self.segment.view, self.capacity)
        self.data_bell, self.space_bell = Doorbell.create(), Doorbell.create()
        self.writer = RingWriter(self.segment.view, self.data_bell)
        self.reader = RingReader(self.segment.view, self.space_bell)

    def teardown(self) -> None:
        self.lent.clear()
        for closable in (self.segment, self.data_bell, self.space_bell):
            closable.close()

    def message(self, kind: int, length: int) -> Message:
        self.number += 1
        return kind, PATTERN[self.number % 251 :][:length]

    @precondition(lambda self: self.push is None)
    @rule(kind=kinds, size=fractions, cut=fractions)
    def try_push(self, kind: int, size: float, cut: float) -> None:
        kind, payload = self.message(kind, int(size * self.writer.max_message))
        middle = int(cut * len(payload))
        is_empty = self.writer.free_bytes == self.capacity
        if self.writer.try_push(kind, [payload[:middle], payload[middle:]]):
            self.sent.append((kind, payload))
            return
        assert not is_empty
        assert self.writer.arm_space()
        self.writer.disarm_space()

    @precondition(lambda self: self.push is None)
    @rule(kind=kinds, size=fractions)
    def begin(self, kind: int, size: float) -> None:
        self.long_message = self.message(kind, int(size * 4 * self.capacity))
        self.push = self.writer.begin(kind, [self.long_message[1]])

    @precondition(lambda self: self.push is not None)
    @rule()
    def advance(self) -> None:
        assert self.push is not None
        is_empty = self.writer.free_bytes == self.capacity
        frames = self.writer.statistics().frames
        if self.push.advance():
            self.sent.append(self.long_message)
            self.push = None
        assert self.writer.statistics().frames > frames or not is_empty

    @rule(limit=st.integers(1, 300))
    def read(self, limit: int) -> None:
        for kind, payload in self.reader.read(limit):
            expected = self.sent.popleft()
            assert (kind, bytes(payload)) == expected
            self.lent.append((expected, payload))
        if limit > 256:
            assert not self.sent
            assert self.reader.arm()
            self.reader.disarm()

    @rule()
    def release(self) -> None:
        for expected, payload in self.lent:
            assert payload == expected[1]
        self.lent.clear()
        self.reader.release()

    @rule()
    def attach_a_new_writer(self) -> None:
        # A message that was on its way is cut for good.
        self.push = None
        self.writer = RingWriter(self.segment.view, self.data_bell)

    @precondition(lambda self: self.push is None)
    @rule()
    def attach_a_new_reader(self) -> None:
        # Pieces of a fragmented message may be given back one by one: it has no second reader.
        self.read(300)
        if any(isinstance(payload.obj, bytearray) for _, payload in self.lent):
            self.release()
        self.reader = RingReader(self.segment.view, self.space_bell)
        self.sent.extendleft(expected for expected, _ in reversed(self.lent))
        self.lent.clear()

    @invariant()
    def nothing_lent_is_overwritten(self) -> None:
        if self.lent:
            expected, payload = self.lent[0]
            assert payload == expected[1]

    @invariant()
    def use_is_within_bounds(self) -> None:
        if hasattr(self, "writer"):
            assert 0 <= self.writer.statistics().used_bytes <= self.capacity


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
