"""A stream that outlives its connections.

A task of its own runs the answer, writes its events down and hands them to the connection that there is, if
any. It goes on when that is lost, and ends when nobody has come back for the length of the window.

    running ──last event──► ended        a reader comes and goes in both
       │                      │
       └── window over ──┬────┘          forgotten; if it was running, it is aborted
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from streamserve.errors import InvalidRequest, StreamserveError
from streamserve.frontend.api.endpoint import Answer, Divertible
from streamserve.frontend.api.problems import problem_of
from streamserve.frontend.resume.errors import EventsGone, StreamExists, StreamTaken, not_found
from streamserve.frontend.resume.log import EventLog
from streamserve.frontend.resume.reading import Ending, Piece, Take

logger = logging.getLogger(__name__)

# While nobody takes what comes, it is written down so often, in one piece.
MERGE_S = 1.0
# A reader that has much to catch up on gets it in pieces of about this size.
PIECE_BYTES = 64 * 1024


class Keeper(Protocol):
    """What a stream asks of the store that it is in (streamserve.frontend.resume.store)."""

    window_s: float

    def grew(self, stream: KeptStream, num_bytes: int) -> None:
        """Its log has so much more in it. Hot: once a batch."""

    def has_room(self, stream: KeptStream) -> bool:
        """Whether more may be written down that nobody takes."""

    def spare(self, stream: KeptStream) -> None:
        """It has ended and nobody reads it."""

    def needed(self, stream: KeptStream) -> None:
        """Somebody reads it."""

    def failed(self, stream: KeptStream) -> None:
        """It failed before its first event; there is nothing to come back to."""

    def expired(self, stream: KeptStream) -> None:
        """Nobody has come back in time."""

    def detached(self, change: int) -> None:
        """One more running stream is without a connection, or one less."""


class KeptStream:
    """One stream, with the events that may be asked for again.

    Args:
        store: where it is kept.
        answer: what it runs; not used by anybody else.
        tenant: name of the API key that it was asked with.
        names_events: as of the endpoint.

    Attributes:
        id: of the answer.
        tenant, names_events: see above.
        log: its events.
        ending: how it ended, once it has.
        failure: why it came to nothing.
        is_confirmed: no other frontend has a stream of that id.
    """

    def __init__(self, store: Keeper, answer: Answer, tenant: str, *, names_events: bool) -> None:
        self.id = answer.id
        self.tenant = tenant
        self.names_events = names_events
        self.log = EventLog()
        self.ending: Ending | None = None
        self.failure: Exception | None = None
        self._store = store
        self._answer = answer
        self._grew: Callable[[KeptStream, int], None] = store.grew
        self._reader: Reader | None = None
        # Whether the reader has all that there is and waits for more, and what takes that at once.
        self._is_live = False
        self._take: Take | None = None
        self._pause: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_detached = False
        self.is_confirmed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def has_reader(self) -> bool:
        """Whether a connection has it."""
        return self._reader is not None

    @property
    def is_running(self) -> bool:
        """Whether there may be more to come."""
        return self.ending is None and self.failure is None

    @property
    def spare(self) -> int:
        """Number of the newest event that may be dropped: the connection that there is has been handed it."""
        if self._take is not None:
            return self.log.last
        return 0 if self._reader is None else self._reader.position

    def start(self, is_elsewhere: Callable[[], Awaitable[bool]] | None) -> None:
        """Begins to generate.

        Args:
            is_elsewhere: asks the other frontends whether one of them has the stream; None if there are none.
        """
        self._task = asyncio.create_task(self._run(is_elsewhere))

    def attach(self, after: int) -> Reader:
        """A connection for the events after that number; an older one loses the stream.

        Raises:
            InvalidRequest: there is no such event yet.
            EventsGone: those after it are no longer held.
        """
        newest = self.log.last if self.ending is None else self.ending.number
        if after > newest:
            raise InvalidRequest(f"after: the newest event of this stream is number {newest}.", "after")
        if after < self.log.first - 1:
            raise EventsGone(
                f"Events of this stream are held from number {self.log.first} on; those before are gone.",
                "after",
            )
        if self._reader is not None:
            self._reader.lose()
        self._stop_timer()
        self._set_detached(is_detached=False)
        self._store.needed(self)
        self.rest()
        self._reader = Reader(self, after)
        return self._reader

    def detach(self, reader: Reader) -> None:
        """The connection of `reader` is gone."""
        if self._reader is not reader:
            return
        self.rest()
        self._reader = None
        if self.failure is None:
            self._set_detached(is_detached=self.is_running)
            self._wait_for_somebody()

    def go_live(self, take: Take | None) -> None:
        """The reader has all that there is; what comes is handed to `take`, if there is one, at once."""
        self._take = take
        self._is_live = True
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    def rest(self) -> None:
        """Events are only written down from now on; the reader looks for itself."""
        if self._take is not None and self._reader is not None:
            self._reader.position = self.log.last
        self._take = None
        self._is_live = False

    def cancel(self) -> None:
        """Ends the generation; the stream then comes to its end."""
        self._answer.cancel()

    def discard(self) -> asyncio.Task[None] | None:
        """Ends it at once and for good; returns what is done when nothing of it runs any more."""
        self._stop_timer()
        self._set_detached(is_detached=False)
        # Tokens may come before the task sees that it is cancelled.
        self._grew = _count_nothing
        if self.is_running:
            self.failure = not_found(self.id)
            self._wake_reader()
        task = self._task
        if task is None or task.done():
            return None
        task.cancel()
        return task

    # Running

    async def _run(self, is_elsewhere: Callable[[], Awaitable[bool]] | None) -> None:
        batches = self._answer.batches()
        failure: Exception | None = None
        try:
            self._write(await self._first(batches, is_elsewhere))
            if self.log.last:
                await self._go_on(batches)
        except Exception as error:
            if not isinstance(error, StreamserveError):
                logger.exception("a stream failed")
            failure = error
        finally:
            await batches.aclose()
        self._end(failure)

    async def _first(
        self,
        batches: AsyncGenerator[list[bytes], None],
        is_elsewhere: Callable[[], Awaitable[bool]] | None,
    ) -> list[bytes]:
        if is_elsewhere is None:
            self.is_confirmed = True
            return await anext(batches, [])
        # Asked meanwhile: only a request that has come twice computes something for nothing.
        asking = asyncio.ensure_future(is_elsewhere())
        try:
            first: list[bytes] = await anext(batches, [])
            if await asking:
                raise stream_exists(self.id)
            self.is_confirmed = True
            return first
        finally:
            asking.cancel()

    async def _go_on(self, batches: AsyncGenerator[list[bytes], None]) -> None:
        """One turn each time that the reader is behind, or for an answer that cannot be diverted, a batch."""
        answer = self._answer
        divert = answer.divert if isinstance(answer, Divertible) and answer.is_divertible else None
        while True:
            if not self._is_live:
                await self._linger()
            if divert is None:
                try:
                    batch = await anext(batches)
                except StopAsyncIteration:
                    return
                self._write(batch)
            elif await divert(self._write):
                return

    def _write(self, batch: list[bytes]) -> bool:
        """Writes events down and hands them on; False if nobody takes more for now. Hot: once a batch."""
        log = self.log
        first = log.last + 1
        self._grew(self, log.append(batch))
        take = self._take
        if take is not None and take(first, batch):
            return True
        self.rest()
        if self._reader is not None:
            self._reader.wake(is_full=take is not None)
        return False

    async def _linger(self) -> None:
        """Waits until a reader takes what comes, or until it is time to write down what has come."""
        loop = asyncio.get_running_loop()
        while not self._is_live:
            pause = self._pause = loop.create_future()
            timer = loop.call_later(MERGE_S, _let_go, pause)
            try:
                await pause
            finally:
                timer.cancel()
                self._pause = None
            if self._store.has_room(self):
                return

    def _end(self, failure: Exception | None) -> None:
        if failure is not None and not self.log.last:
            self.failure = failure
            self._stop_timer()
            self._set_detached(is_detached=False)
            self._store.failed(self)
            self._wake_reader()
            return
        self.ending = Ending(self.log.last + 1, None if failure is None else problem_of(failure))
        self.rest()
        self._set_detached(is_detached=False)
        if self._reader is None:
            self._wait_for_somebody()
        else:
            self._reader.wake()

    def _wake_reader(self) -> None:
        if self._reader is not None:
            self._reader.wake()

    def _wait_for_somebody(self) -> None:
        if self.ending is not None:
            self._store.spare(self)
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._store.window_s, self._store.expired, self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_detached(self, *, is_detached: bool) -> None:
        if is_detached != self._is_detached:
            self._is_detached = is_detached
            self._store.detached(1 if is_detached else -1)


class Reader:
    """One connection's place in a stream of this frontend (streamserve.frontend.resume.reading.Reading).

    Args:
        stream: what is read.
        after: number of the event before the first that is wanted.

    Attributes:
        position: number of the newest event that was handed over; while events are diverted, of an older one.
    """

    def __init__(self, stream: KeptStream, after: int) -> None:
        self.position = after
        self._stream = stream
        self._diverted: Take | None = None
        self._is_lost = False
        self._is_full = False
        self._on_lost: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def stream_id(self) -> str:
        """The answer's id."""
        return self._stream.id

    @property
    def names_events(self) -> bool:
        """As of the endpoint."""
        return self._stream.names_events

    def divert(self, take: Take, lose: Callable[[], None]) -> None:
        """From now on events may be handed to `take` while somebody waits in `read`."""
        self._diverted = take
        self._on_lost = lose

    async def read(self) -> Piece:
        """The next events, as soon as there are any."""
        stream = self._stream
        while True:
            if self._is_lost:
                raise StreamTaken("Another connection has taken this stream over.")
            if stream.failure is not None:
                raise stream.failure
            piece = self._held()
            if piece is not None:
                return piece
            if self._is_full:
                # Whoever takes events wants to wait before the next.
                self._is_full = False
                return Piece(self.position + 1, [])
            self._waiter = asyncio.get_running_loop().create_future()
            # It has all that there is, so whatever comes next can be handed over as it comes.
            stream.go_live(self._diverted)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if not self._is_lost:
                    stream.rest()

    def wake(self, *, is_full: bool = False) -> None:
        """There is something to look at.

        Args:
            is_full: what takes events wants no more for now.
        """
        self._is_full = is_full
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def lose(self) -> None:
        """The stream is somebody else's."""
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()
        self.wake()

    def cancel(self) -> None:
        """Ends the generation."""
        if not self._is_lost:
            self._stream.cancel()

    def close(self) -> None:
        """The connection is gone."""
        self._stream.detach(self)

    def _held(self) -> Piece | None:
        stream, log = self._stream, self._stream.log
        first, ending = self.position + 1, stream.ending
        events = log.after(self.position, PIECE_BYTES) if self.position < log.last else []
        self.position += len(events)
        if ending is not None and self.position >= ending.number - 1:
            is_known = self.position == ending.number
            self.position = ending.number
            return Piece(first, events, ending, is_known)
        return Piece(first, events) if events else None


def stream_exists(stream_id: str) -> StreamExists:
    """What to tell somebody whose request has come twice."""
    return StreamExists(
        f"A stream of yours has the id {stream_id!r} already; it can be had by GET /v1/streams/{stream_id}.",
        "id",
    )


def _count_nothing(_stream: KeptStream, _num_bytes: int) -> None:
    pass


def _let_go(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)
