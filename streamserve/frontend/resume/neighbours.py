"""Streams of other frontends: a connection that comes to this one is fed by the one that runs the stream.

    client ── HTTP or WebSocket ── this frontend ── socket (streamserve.ipc.door) ── the other

Which one it is, is asked by the way of control calls; the events themselves come over the socket, in frames,
as fast as the client reads them. If either end goes, so does the other: a client that leaves leaves its
stream behind as one that was connected there, and a frontend that dies breaks the connections it feeds.

    frame   kind u8 │ number u64 │ length u32 │ payload        little-endian
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Any, Protocol

import orjson

from streamserve.errors import EngineUnavailable, StreamserveError
from streamserve.frontend.api.problems import Problem, Told, problem_of
from streamserve.frontend.resume.errors import not_found
from streamserve.frontend.resume.reading import Ending, Piece, Reading, Take
from streamserve.frontend.resume.store import StreamStore
from streamserve.ipc.door import Doors

logger = logging.getLogger(__name__)

FIND, CLAIM = "resume.find", "resume.claim"
ANSWER_TIMEOUT_S = 5.0
CANCEL = b"c"
# No JSON object has one in it.
SEPARATOR = b"\n"
_HEAD = struct.Struct("<BQI")


class Frame(IntEnum):
    """What a frame says."""

    # The stream is the caller's; the payload is "1" if it names its events, else "0".
    ACCEPTED = 0
    # JSON objects from `number` on.
    EVENTS = 1
    # The ending, `number` of all; the payload is a problem or nothing. KNOWN: the caller has had it.
    ENDED = 2
    KNOWN = 3
    # A problem, and nothing follows.
    REFUSED = 4


class Relay(Protocol):
    """What is asked of the way to the others (streamserve.frontend.client.EngineClient)."""

    async def relay(self, body: Any) -> Any | None:
        """What another frontend answers; None if none has an answer."""


class Neighbours:
    """The streams of other frontends, and this one's for those.

    Args:
        store: the streams of this frontend.
        client: carries questions to all others.
        doors: the way to each of them.
        index: which of them this one is.
    """

    def __init__(self, store: StreamStore, client: Relay, doors: Doors, index: int) -> None:
        self._store = store
        self._client = client
        self._doors = doors
        self._index = index
        self._visits: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to answer the others, on the running loop."""
        asyncio.get_running_loop().add_reader(self._doors.fileno(), self._let_in)

    async def stop(self) -> None:
        """Ends all that others read here."""
        asyncio.get_running_loop().remove_reader(self._doors.fileno())
        for visit in self._visits:
            visit.cancel()
        if self._visits:
            await asyncio.wait(self._visits)

    def claim(self, stream_id: str, tenant: str) -> Callable[[], Awaitable[bool]]:
        """How to ask whether another frontend has a stream of that id."""

        async def is_elsewhere() -> bool:
            question = {"method": CLAIM, "id": stream_id, "tenant": tenant, "frontend": self._index}
            return bool(await self._client.relay(question))

        return is_elsewhere

    def answer(self, question: dict[str, Any]) -> Any | None:
        """What another frontend wants to know of this one; None if there is nothing to say."""
        if question.get("method") not in (FIND, CLAIM):
            return None
        stream = self._store.find(question["id"], question["tenant"])
        if stream is None:
            return None
        if question["method"] == FIND:
            return {"frontend": self._index}
        # Of two that begin one stream at the same moment, one goes on.
        return True if stream.is_confirmed or self._index < question["frontend"] else None

    async def read(self, stream_id: str, tenant: str | None, after: int) -> RemoteReading:
        """A stream of another frontend.

        Raises:
            StreamNotFound: none has it.
            Told: the one that has it refuses.
            EngineUnavailable: that one does not answer.
        """
        place = await self._client.relay({"method": FIND, "id": stream_id, "tenant": tenant})
        if place is None:
            raise not_found(stream_id)
        question = orjson.dumps({"id": stream_id, "tenant": tenant, "after": after})
        try:
            ours = self._doors.knock(place["frontend"], question)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await _accepted(stream_id, ours)
        except (OSError, EOFError):
            raise EngineUnavailable("The frontend that runs this stream does not answer.") from None

    def _let_in(self) -> None:
        try:
            for question, theirs in self._doors.visits():
                visit = asyncio.create_task(self._serve(question, theirs))
                self._visits.add(visit)
                visit.add_done_callback(self._visits.discard)
        except EOFError:
            # The supervisor is gone, and this process will be.
            asyncio.get_running_loop().remove_reader(self._doors.fileno())

    async def _serve(self, question: bytes, theirs: socket.socket) -> None:
        if _is_gone(theirs):
            # It has waited too long, and must not take the stream from who came after it.
            theirs.close()
            return
        try:
            reader, writer = await asyncio.open_unix_connection(sock=theirs)
        except BaseException:
            theirs.close()
            raise
        try:
            asked = orjson.loads(question)
            stream = self._store.find(asked["id"], asked["tenant"])
            if stream is None:
                raise not_found(asked["id"])
            reading = stream.attach(asked["after"])
            writer.write(_frame(Frame.ACCEPTED, 0, b"1" if reading.names_events else b"0"))
            try:
                await _until_either(_hear(reader, reading), _feed(writer, reading))
            finally:
                reading.close()
        except (OSError, EOFError):
            # The client has left, or the frontend that it came to.
            pass
        except Exception as error:
            if not isinstance(error, StreamserveError):
                logger.exception("another frontend could not be served")
            writer.write(_frame(Frame.REFUSED, 0, _encode(problem_of(error))))
        finally:
            writer.close()


class RemoteReading:
    """One connection's place in a stream of another frontend (streamserve.frontend.resume.reading.Reading).

    Attributes:
        stream_id, names_events: as of `Reading`.
    """

    def __init__(
        self,
        stream_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        names_events: bool,
    ) -> None:
        self.stream_id = stream_id
        self.names_events = names_events
        self._reader = reader
        self._writer = writer

    async def read(self) -> Piece:
        """The next events, as soon as there are any."""
        try:
            kind, number, payload = await _read_frame(self._reader)
        except (OSError, EOFError):
            raise EngineUnavailable("The frontend that ran this stream is gone.") from None
        if kind == Frame.EVENTS:
            return Piece(number, payload.split(SEPARATOR))
        if kind == Frame.REFUSED:
            raise Told(_decode(payload))
        ending = Ending(number, _decode(payload) if payload else None)
        return Piece(number, [], ending, is_known=kind == Frame.KNOWN)

    def divert(self, take: Take, lose: Callable[[], None]) -> None:
        """Nothing comes in the turn of the event loop that it is made in."""

    def cancel(self) -> None:
        """Ends the generation."""
        self._writer.write(CANCEL)

    def close(self) -> None:
        """The connection is gone."""
        self._writer.close()


def _is_gone(theirs: socket.socket) -> bool:
    """Whether the other side of a fresh connection has been closed already."""
    try:
        return not theirs.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


async def _accepted(stream_id: str, ours: socket.socket) -> RemoteReading:
    try:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
    except BaseException:
        ours.close()
        raise
    try:
        kind, _, payload = await _read_frame(reader)
        if kind == Frame.REFUSED:
            raise Told(_decode(payload))
        return RemoteReading(stream_id, reader, writer, names_events=payload == b"1")
    except BaseException:
        writer.close()
        raise


async def _feed(writer: asyncio.StreamWriter, reading: Reading) -> None:
    """Sends what is read, as fast as the other side takes it. Hot: one turn a piece."""
    while True:
        piece = await reading.read()
        frames = b""
        if piece.events:
            frames = _frame(Frame.EVENTS, piece.first, SEPARATOR.join(piece.events))
        if piece.ending is not None:
            number, problem = piece.ending
            kind = Frame.KNOWN if piece.is_known else Frame.ENDED
            frames += _frame(kind, number, b"" if problem is None else _encode(problem))
        writer.write(frames)
        await writer.drain()
        if piece.ending is not None:
            return


async def _hear(reader: asyncio.StreamReader, reading: Reading) -> None:
    """Does what the other side says, until it is gone."""
    while said := await reader.read(1):
        if said == CANCEL:
            reading.cancel()


async def _until_either(*work: Awaitable[None]) -> None:
    """Ends when one of them does, and as it does."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        with contextlib.suppress(asyncio.CancelledError):
            task.result()


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    kind, number, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return kind, number, await reader.readexactly(length) if length else b""


def _frame(kind: Frame, number: int, payload: bytes) -> bytes:
    return _HEAD.pack(kind, number, len(payload)) + payload


def _encode(problem: Problem) -> bytes:
    return orjson.dumps(dataclasses.asdict(problem))


def _decode(payload: bytes) -> Problem:
    known = orjson.loads(payload)
    return Problem(**{**known, "headers": tuple((name, value) for name, value in known["headers"])})
