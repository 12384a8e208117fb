"""The events of one stream, as they were written: JSON objects, numbered from 1."""

from __future__ import annotations

# What an event takes besides its bytes: the object around them and its place in the list.
EVENT_BYTES = 64


class EventLog:
    """Events first … last, of which the oldest may be dropped.

    Attributes:
        first: number of the oldest that is held, or of the next one if there is none.
        last: number of the newest that there ever was; 0 before the first.
        num_bytes: what is held takes so much memory.
    """

    __slots__ = ("_events", "first", "last", "num_bytes")

    def __init__(self) -> None:
        self.first = 1
        self.last = 0
        self.num_bytes = 0
        self._events: list[bytes] = []

    def append(self, batch: list[bytes]) -> int:
        """Adds events; returns the memory they take. Hot: once a batch."""
        self._events += batch
        num_events = len(batch)
        self.last += num_events
        size = (len(batch[0]) if num_events == 1 else sum(map(len, batch))) + EVENT_BYTES * num_events
        self.num_bytes += size
        return size

    def after(self, number: int, max_bytes: int) -> list[bytes]:
        """The events that follow `number`: at least one if there is any, at most `max_bytes` of several.

        `number` must be `first - 1` or more.
        """
        start = number + 1 - self.first
        assert start >= 0, "events that are no longer held"
        end, num_bytes = start, 0
        while end < len(self._events):
            num_bytes += len(self._events[end])
            if num_bytes > max_bytes and end > start:
                break
            end += 1
        return self._events[start:end]

    def drop(self, num_bytes: int, up_to: int) -> int:
        """Drops the oldest, none of them above `up_to`, until so much memory is free; returns how much is."""
        count = freed = 0
        most = min(up_to + 1 - self.first, len(self._events))
        while count < most and freed < num_bytes:
            freed += len(self._events[count]) + EVENT_BYTES
            count += 1
        del self._events[:count]
        self.first += count
        self.num_bytes -= freed
        return freed
