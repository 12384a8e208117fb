"""What goes to the engine, in order, without ever blocking the event loop.

Messages that find no room in the request ring wait here; the engine rings the frontend's doorbell when
there is room, and the pump calls `flush()`. An ABORT overtakes ADDs that have not begun to leave, and an
ADD that nobody waits for any more is dropped instead of being followed by an ABORT.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from streamserve.ipc.layout import RingStatistics
from streamserve.messages import AddRequest, Buffer, Kind, encode_abort, encode_add

MAX_ABORTS_PER_FRAME = 128


class Fragments(Protocol):
    """A long message on its way (streamserve.ipc.ring.FragmentedPush)."""

    def advance(self) -> bool:
        """Sends what there is room for; True when all is in the ring."""


class Writer(Protocol):
    """The producer's side of a ring (streamserve.ipc.ring.RingWriter)."""

    max_message: int

    def statistics(self) -> RingStatistics:
        """How full it is, and what went through."""

    def try_push(self, kind: int, parts: Sequence[Buffer]) -> bool:
        """Sends one message if there is room."""

    def begin(self, kind: int, parts: Sequence[Buffer]) -> Fragments:
        """Begins a message longer than `max_message`."""

    def arm_space(self) -> bool:
        """Asks to be woken when there is room; False if there is room now."""

    def disarm_space(self) -> None:
        """Takes that back."""


class Sender:
    """The only one that writes into the request ring.

    Args:
        writer: producer's side of the request ring.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._epoch = 0
        # By stream, in the order they came; each as one buffer, joined once however often there is no room.
        self._adds: dict[int, bytes] = {}
        self._aborts: list[int] = []
        self._calls: deque[list[Buffer]] = deque()
        self._fragments: Fragments | None = None
        self._is_armed = False

    def reset(self, epoch: int) -> None:
        """Turns to a new engine: what was meant for the last one is dropped.

        A message that has begun to leave is finished; the new engine drops it by its epoch.
        """
        self._epoch = epoch
        self._adds.clear()
        self._aborts.clear()
        self._calls.clear()

    def statistics(self) -> RingStatistics:
        """Of the request ring."""
        return self._writer.statistics()

    @property
    def num_queued(self) -> int:
        """Messages that wait for room in the ring."""
        return len(self._adds) + len(self._calls) + bool(self._aborts) + (self._fragments is not None)

    def add(self, request: AddRequest) -> None:
        """Sends a request, now or as soon as there is room."""
        # Encoded now: should that fail, it is this request that fails.
        self._adds[request.stream] = b"".join(encode_add(self._epoch, request))
        self._try_flush()

    def abort(self, stream: int) -> None:
        """Sends the abort of `stream`, or takes its request back if it has not left yet."""
        if self._adds.pop(stream, None) is None:
            self._aborts.append(stream)
            self._try_flush()

    def call(self, frame: list[Buffer]) -> None:
        """Sends a CALL frame."""
        self._calls.append(frame)
        self._try_flush()

    def _try_flush(self) -> None:
        # Once the ring was full, only the bell says when to try again: not every request does.
        if not self._is_armed:
            self.flush()

    def flush(self) -> None:
        """Sends as much as there is room for, and asks to be woken if something is left."""
        if self._is_armed:
            self._writer.disarm_space()
            self._is_armed = False
        while not self._send_queued():
            if self._writer.arm_space():
                self._is_armed = True
                return

    def _send_queued(self) -> bool:
        """Sends until all is sent (True) or the ring is full (False)."""
        while True:
            if self._fragments is not None:
                if not self._fragments.advance():
                    return False
                self._fragments = None
            if self._aborts:
                some = self._aborts[:MAX_ABORTS_PER_FRAME]
                if not self._writer.try_push(Kind.ABORT, encode_abort(self._epoch, some)):
                    return False
                del self._aborts[: len(some)]
                continue
            if self._calls:
                if not self._send(Kind.CALL, self._calls[0]):
                    return False
                self._calls.popleft()
            elif self._adds:
                stream = next(iter(self._adds))
                if not self._send(Kind.ADD, [self._adds[stream]]):
                    return False
                del self._adds[stream]
            else:
                return True

    def _send(self, kind: Kind, parts: list[Buffer]) -> bool:
        """Sends a message, or begins to if it is a long one; False if there is no room."""
        if sum(len(part) for part in parts) <= self._writer.max_message:
            return self._writer.try_push(kind, parts)
        self._fragments = self._writer.begin(kind, parts)
        return True
