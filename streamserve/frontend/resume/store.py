"""The kept streams of a frontend, within bounds.

What is over a bound makes room in this order: streams that have ended and that nobody reads go, those that
ended first at first; a running stream drops its oldest events that its connection has had; and one that has
no connection, or a slow one, writes nothing more down, so that its text waits in one piece where it is made.
A new stream for which there is no room runs as any other, but ends with its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from streamserve.frontend.api.endpoint import Answer
from streamserve.frontend.metrics import Metrics
from streamserve.frontend.resume.stream import KeptStream, stream_exists

WINDOW_S = 60.0
MAX_BYTES = 64 * 2**20
MAX_STREAMS = 4096
# No stream may have more than one part in so many of the memory.
STREAM_PARTS = 8
# A new stream is promised at least so much, or one part in so many.
LEAST_BYTES = 64 * 1024
LEAST_PARTS = 64
# A stream that makes room makes so much at once, as a part of what it may have.
SHED_PARTS = 4


class StreamStore:
    """Keeps streams, finds them, and forgets them.

    Args:
        window_s: how long a stream is kept without a connection; 0 keeps none.
        max_bytes: the events of all streams together.
        metrics: where they are counted.
        max_streams: most of them.

    Attributes:
        window_s: see above.
        num_bytes: memory of all events.
    """

    def __init__(
        self,
        window_s: float = WINDOW_S,
        max_bytes: int = MAX_BYTES,
        metrics: Metrics | None = None,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        self.window_s = window_s
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_stream_bytes = max_bytes // STREAM_PARTS
        self._least_bytes = min(LEAST_BYTES, max_bytes // LEAST_PARTS)
        self._max_streams = max_streams
        self._numbers = (metrics or Metrics()).resume
        # By id and tenant: two callers may choose the same id.
        self._streams: dict[str, dict[str, KeptStream]] = {}
        self._num_streams = 0
        # Those that have ended and that nobody reads, in the order in which that came about.
        self._spare: dict[KeptStream, None] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    def open(
        self,
        answer: Answer,
        tenant: str,
        *,
        names_events: bool,
        is_elsewhere: Callable[[], Awaitable[bool]] | None = None,
    ) -> KeptStream | None:
        """Runs `answer` as a stream that is kept; None if it cannot be, and nothing has happened then.

        Args:
            tenant: name of the API key.
            names_events: as of the endpoint.
            is_elsewhere: asks the other frontends whether one of them has the stream.

        Raises:
            StreamExists: this caller has a stream of that id.
        """
        if self.window_s <= 0:
            return None
        if self.find(answer.id, tenant) is not None:
            raise stream_exists(answer.id)
        if not self._has_place():
            self._numbers.refused.add()
            return None
        stream = KeptStream(self, answer, tenant, names_events=names_events)
        self._streams.setdefault(answer.id, {})[tenant] = stream
        self._num_streams += 1
        stream.start(is_elsewhere)
        return stream

    def find(self, stream_id: str, tenant: str | None) -> KeptStream | None:
        """The stream of that id.

        Args:
            tenant: only that of this API key's name; None finds the newest of anybody.
        """
        streams = self._streams.get(stream_id)
        if not streams:
            return None
        return next(reversed(streams.values())) if tenant is None else streams.get(tenant)

    def sample(self) -> None:
        """Writes down how much memory the events take."""
        self._numbers.num_bytes.set(self.num_bytes)

    def __len__(self) -> int:
        return self._num_streams

    async def close(self) -> None:
        """Aborts and forgets all of them."""
        for stream in [stream for streams in self._streams.values() for stream in streams.values()]:
            self._abort(stream)
        if self._aborting:
            await asyncio.wait(self._aborting)

    # What streams say (streamserve.frontend.resume.stream.Keeper)

    def grew(self, stream: KeptStream, num_bytes: int) -> None:
        """Its log has so much more in it. Hot: once a batch."""
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes or stream.log.num_bytes > self._max_stream_bytes:
            self._make_room(stream)

    def has_room(self, stream: KeptStream) -> bool:
        """Whether more may be written down that nobody takes."""
        if stream.log.num_bytes >= self._max_stream_bytes:
            return False
        self._forget_spare(0)
        return self.num_bytes < self._max_bytes

    def spare(self, stream: KeptStream) -> None:
        """It has ended and nobody reads it."""
        if self._has(stream):
            self._spare[stream] = None

    def needed(self, stream: KeptStream) -> None:
        """Somebody reads it."""
        self._spare.pop(stream, None)

    def failed(self, stream: KeptStream) -> None:
        """It came to nothing."""
        self._forget(stream)

    def expired(self, stream: KeptStream) -> None:
        """Nobody has come back in time."""
        if stream.is_running:
            self._numbers.expired.add()
        self._abort(stream)

    def detached(self, change: int) -> None:
        """One more running stream is without a connection, or one less."""
        self._numbers.detached.add(change)

    # Room

    def _has_place(self) -> bool:
        """Whether there is room for one more stream."""
        self._forget_spare(self._least_bytes)
        while self._num_streams >= self._max_streams:
            if not self._forget_oldest():
                return False
        return self.num_bytes + self._least_bytes <= self._max_bytes

    def _make_room(self, stream: KeptStream) -> None:
        self._forget_spare(0)
        over = max(self.num_bytes - self._max_bytes, stream.log.num_bytes - self._max_stream_bytes)
        if over > 0 and stream.spare:
            # Some more than is needed, so that not every event has to.
            self._lose(stream.log.drop(over + stream.log.num_bytes // SHED_PARTS, stream.spare))

    def _forget_spare(self, num_bytes: int) -> None:
        """Forgets ended streams until so much memory is free."""
        while self.num_bytes + num_bytes > self._max_bytes and self._forget_oldest():
            pass

    def _forget_oldest(self) -> bool:
        oldest = next(iter(self._spare), None)
        if oldest is None:
            return False
        self._abort(oldest)
        return True

    def _abort(self, stream: KeptStream) -> None:
        self._forget(stream)
        task = stream.discard()
        if task is not None:
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    def _forget(self, stream: KeptStream) -> None:
        if not self._has(stream):
            return
        streams = self._streams[stream.id]
        del streams[stream.tenant]
        if not streams:
            del self._streams[stream.id]
        self._num_streams -= 1
        self._spare.pop(stream, None)
        self._lose(stream.log.num_bytes)

    def _has(self, stream: KeptStream) -> bool:
        return self._streams.get(stream.id, {}).get(stream.tenant) is stream

    def _lose(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
