"""One producer, several readers that each see every message; the slowest bounds the producer.

The same map and frames as the plain ring (`streamserve.ipc.layout`), with a head and a sleeping flag for each
reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.layout import format_segment, segment_bytes
from streamserve.ipc.ring import RingReader, RingWriter


def broadcast_bytes(capacity: int, num_readers: int) -> int:
    """Segment size for `num_readers` readers and `capacity` bytes of data (a power of two)."""
    return segment_bytes(capacity, num_readers)


def format_broadcast(view: memoryview, capacity: int, num_readers: int) -> None:
    """Makes an empty broadcast ring of `view`; once, by the creator, before anybody attaches."""
    format_segment(view, capacity, num_readers)


class BroadcastWriter(RingWriter):
    """The producer's side.

    Args:
        view: a formatted segment, format "B".
        bells: the bell of each reader, in the order of their index.

    Raises:
        RingCorrupted: the segment holds no ring.
        ValueError: there are more or fewer readers than bells.
    """

    def __init__(self, view: memoryview, bells: Sequence[Doorbell]) -> None:
        self._attach(view, bells)


class BroadcastReader(RingReader):
    """One reader's side. A reader that never reads stops the producer when the ring is full.

    Args:
        view: a formatted segment, format "B".
        index: which reader this is; each belongs to one process.
        space_bell: wakes the producer when it waits for room; None for one that never does.

    Raises:
        RingCorrupted: the segment holds no ring.
        ValueError: the ring has no such reader.
    """

    def __init__(self, view: memoryview, index: int, space_bell: Doorbell | None) -> None:
        self._attach(view, index, space_bell)
