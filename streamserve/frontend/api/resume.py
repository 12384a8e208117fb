"""Streams that outlive their connections, as endpoints and transports see them (docs/api.md).

Beginning one is `Resumption.begin`, coming back `Resumption.resume`; either gives a `Reading`, from which a
transport takes numbered events. With several frontends the one that is asked need not be the one that runs
the stream; it reads from that one then (streamserve.frontend.resume.neighbours).
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamserve.errors import InvalidRequest, StreamserveError
from streamserve.frontend import paths
from streamserve.frontend.api.endpoint import Answer, Call, tenant_of
from streamserve.frontend.api.problems import Problem
from streamserve.frontend.api.service import Service
from streamserve.frontend.api.sse import EventResponse, Framing, framed, told
from streamserve.frontend.api.waiting import begin, end
from streamserve.frontend.auth import is_admin
from streamserve.frontend.resume.errors import not_found
from streamserve.frontend.resume.neighbours import Neighbours
from streamserve.frontend.resume.reading import Ending, Piece, Reading

ASK_HEADER = "x-stream-resume"
STREAM_HEADER = "x-stream-id"
LAST_EVENT_ID = "last-event-id"
# More than any stream has events.
_MAX_DIGITS = 18
# More than a prefix and what a caller may choose.
_MAX_ID_CHARS = 256


class Resumption:
    """Begins kept streams, and finds them again.

    Args:
        service: the streams of this frontend.
        neighbours: those of the others, if there are any.
    """

    def __init__(self, service: Service, neighbours: Neighbours | None = None) -> None:
        self._service = service
        self._neighbours = neighbours
        self._resumed = service.registry.metrics.resume.resumed

    def begin(self, answer: Answer, call: Call, *, names_events: bool) -> Reading | None:
        """Runs `answer` as a stream that is kept; None if it cannot be, and nothing has happened then.

        Raises:
            StreamExists: the caller has one of that id.
        """
        neighbours = self._neighbours
        stream = self._service.kept.open(
            answer,
            call.tenant,
            names_events=names_events,
            is_elsewhere=None if neighbours is None else neighbours.claim(answer.id, call.tenant),
        )
        return None if stream is None else stream.attach(0)

    async def resume(self, stream_id: str, tenant: str | None, after: int) -> Reading:
        """A stream from after event number `after` on.

        Args:
            tenant: whose it must be; None is anybody's.

        Raises:
            StreamNotFound: the caller has none of that id.
            InvalidRequest: there is no such event.
            EventsGone: what comes after it is no longer held.
        """
        if len(stream_id) > _MAX_ID_CHARS:
            # Nobody need be asked.
            raise not_found(stream_id)
        stream = self._service.kept.find(stream_id, tenant)
        reading: Reading
        if stream is not None:
            reading = stream.attach(after)
        elif self._neighbours is not None:
            reading = await self._neighbours.read(stream_id, tenant, after)
        else:
            raise not_found(stream_id)
        self._resumed.add()
        return reading

    def is_detached(self, stream_id: str, tenant: str) -> bool:
        """Whether a running stream of this frontend is without a connection."""
        stream = self._service.kept.find(stream_id, tenant)
        return stream is not None and not stream.has_reader

    async def respond(self, receive: Receive, reading: Reading, patience_s: float) -> Response:
        """The HTTP response that sends what is read.

        Args:
            patience_s: so long it waits for the first event before it begins. Until then an error is an
                ordinary response.

        Raises:
            ClientDisconnect: the client left before.
            StreamserveError: the stream failed before.
        """
        service = self._service
        try:
            first = await begin(receive, _first(reading), patience_s)
        except BaseException:
            reading.close()
            raise
        return ResumableEventStream(
            reading,
            first,
            ping_interval_s=service.ping_interval_s,
            write_timeout_s=service.write_timeout_s,
        )


async def _first(reading: Reading) -> Piece:
    return await reading.read()


def reach_of(scope: Scope) -> str | None:
    """Whose streams a caller may have: those of its own key's name; None is everybody's."""
    return None if is_admin(scope) else tenant_of(scope)


def wants_events(http: Request) -> bool:
    """Whether a GET for a stream asks for its events rather than for what it is doing."""
    if http.method != "GET":
        return False
    return LAST_EVENT_ID in http.headers or paths.EVENT_STREAM in http.headers.get("accept", "").lower()


def position_of(stream_id: str, headers: Headers, query: QueryParams) -> int:
    """The number of the last event that a client has; 0 if it has none.

    A browser that comes back by itself sends the header, and asks for the same URL again: the header counts.

    Raises:
        InvalidRequest: it is no number, or that of another stream.
    """
    if last := headers.get(LAST_EVENT_ID):
        own, _, number = last.rpartition(":")
        if own != stream_id:
            raise InvalidRequest(
                "Last-Event-ID: it must be the id of an event of this stream, STREAM:NUMBER.", "Last-Event-ID"
            )
        return _number(number, "Last-Event-ID")
    return _number(query.get("after", "0"), "after")


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise InvalidRequest(f"{name}: {text[:40]!r} is not the number of an event.", name)
    return int(text)


class NumberedFraming:
    """Numbered JSON objects as server-sent events with ids.

    Args:
        stream_id: of the stream.
        names_events: as of `Framing`.
    """

    def __init__(self, stream_id: str, *, names_events: bool) -> None:
        self._framing = Framing(names_events=names_events)
        self._is_plain = not names_events
        self._head = b"id: " + stream_id.encode() + b":"

    def events(self, first: int, batch: list[bytes]) -> bytes:
        """What came at once, as one piece to write. Hot: once a batch."""
        head = self._head
        if len(batch) == 1 and self._is_plain and batch[0].isascii():
            return b"%b%d\ndata: %b\n\n" % (head, first, batch[0])
        events = self._framing.events
        return b"".join(
            [b"%b%d\n%b" % (head, number, events([encoded])) for number, encoded in enumerate(batch, first)]
        )

    def ending(self, ending: Ending) -> bytes:
        """The last event, if the stream does not say itself that it is over."""
        framing, problem = self._framing, ending.problem
        event = framing.end if problem is None else framing.error(problem)
        return b"%b%d\n%b" % (self._head, ending.number, event) if event else b""

    def refusal(self, problem: Problem) -> bytes:
        """What there is instead of a stream that failed before its first event; it has no number."""
        return self._framing.refusal(problem)


class ResumableEventStream(EventResponse):
    """Sends the events of a kept stream. Where the server allows it, past task and middleware.

    A client that is gone, or has not read for too long, leaves the stream behind. A connection that loses it
    to a newer one, or the frontend that runs it, is dropped.

    Args:
        reading: the stream; closed in any case.
        first: what gets the first of it; ended in any case. While it runs, the client is told that its
            request is being worked on.
        ping_interval_s: silence after which a comment is sent.
        write_timeout_s: how long one send may wait for the client to read.
    """

    def __init__(
        self,
        reading: Reading,
        first: asyncio.Task[Piece],
        *,
        ping_interval_s: float,
        write_timeout_s: float,
    ) -> None:
        headers = {STREAM_HEADER: reading.stream_id}
        super().__init__(headers, ping_interval_s=ping_interval_s, write_timeout_s=write_timeout_s)
        self._reading = reading
        self._first = first
        self._framing = NumberedFraming(reading.stream_id, names_events=reading.names_events)

    async def _close(self) -> None:
        await end(self._first)
        self._reading.close()

    async def _stream_events(self, send: Send) -> bytes | None:
        """One turn a piece, or each time the client is slow."""
        reading = self._reading
        can_divert = self._drain_chunks is not None
        if can_divert:
            reading.divert(self._write, self._drop)
        try:
            piece = await self._patiently(send, self._first)
        except Exception as error:
            return self._framing.refusal(told(error))
        while True:
            events = await framed(partial(self._framing.events, *piece[:2]), piece.events)
            if piece.ending is not None:
                return events if piece.is_known else events + self._framing.ending(piece.ending)
            if events:
                await self._send(send, events)
            if can_divert:
                await self._drain()
            try:
                piece = await reading.read()
            except StreamserveError:
                return None

    def _drop(self) -> None:
        # The client may be one that does not read, for which all else here waits.
        if self._abort is not None:
            self._abort()

    def _write(self, first: int, batch: list[bytes]) -> bool:
        """Hands events to the server; False if the client should be waited for. Hot: once a batch."""
        self._last_send_s = time.monotonic()
        return self._write_chunk(self._framing.events(first, batch))
