"""What the supervisor says about the engine, for every frontend to read at any time.

One aligned u64, `epoch << 8 | state`, read and written by a single move: never half of the old and half of
the new. Who must act on a change is woken by a doorbell besides.
"""

from __future__ import annotations

from enum import IntEnum
from types import TracebackType
from typing import Self

from streamserve.ipc.layout import LINE_BYTES
from streamserve.ipc.segment import Segment

# Of the first engine of a server; each later one has the next.
FIRST_EPOCH = 1

_STATE_BITS = 8


class EngineState(IntEnum):
    """What the engine of the board's epoch is doing. DEAD: it is gone, and no other will come."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    DEAD = 3


class StatusBoard:
    """Written by the supervisor only. A new one shows epoch 0, STARTING.

    Attributes:
        fd: descriptor of its memory, to be passed to children.
    """

    def __init__(self, segment: Segment) -> None:
        self.fd = segment.fd
        self._segment = segment
        self._words = segment.view.cast("Q")

    @classmethod
    def create(cls) -> StatusBoard:
        """A new board.

        Raises:
            ConfigError: there is no memory for it.
        """
        return cls(Segment.create("streamserve-board", LINE_BYTES))

    @classmethod
    def attach(cls, fd: int) -> StatusBoard:
        """The board behind an inherited descriptor, which is left open by `close`."""
        return cls(Segment.attach(fd))

    def publish(self, epoch: int, state: EngineState) -> None:
        """Shows `state` of engine start `epoch`."""
        self._words[0] = epoch << _STATE_BITS | state

    def read(self) -> tuple[int, EngineState]:
        """`(epoch, state)` as last published."""
        word = self._words[0]
        return word >> _STATE_BITS, EngineState(word & (1 << _STATE_BITS) - 1)

    def close(self) -> None:
        """Unmaps the board; again does nothing."""
        self._words.release()
        self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
