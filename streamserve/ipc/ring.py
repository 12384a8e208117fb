"""A ring of byte messages in shared memory: one producer, one consumer, no system call while both are busy.

Map, frame format and order of the stores are in `streamserve.ipc.layout`. A writer or reader belongs to one
thread. All positions are shared, so a process that attaches after another died goes on where that one
stopped: a new producer behind the last whole frame, a new consumer at the first message not released. Of a
message in fragments that such a death cut, the reader drops the pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.layout import (
    CONTINUED,
    FLAGS_SHIFT,
    FRAME_HEADER,
    HEADER_BYTES,
    MORE,
    PAD,
    TAIL_WORD,
    TOTAL_STORE_ORDER,
    WANTED_WORD,
    Fence,
    RingCorrupted,
    RingMap,
    RingStatistics,
    format_segment,
    head_word,
    segment_bytes,
    sleeping_word,
)

Buffer = bytes | bytearray | memoryview

# Value of RingWriter._room while a fragmented message has the ring to itself: no frame fits.
_TAKEN = -1

_join = b"".join
_unpack_header = FRAME_HEADER.unpack_from


def ring_bytes(capacity: int) -> int:
    """Segment size of a ring with `capacity` bytes of data (a power of two)."""
    return segment_bytes(capacity, 1)


def format_ring(view: memoryview, capacity: int) -> None:
    """Makes an empty ring of `view`; once, by the creator, before anybody attaches."""
    format_segment(view, capacity, 1)


class RingWriter:
    """The producer's side.

    Args:
        view: a formatted segment, format "B".
        data_bell: wakes the consumer; rung only if it sleeps.

    Attributes:
        max_message: bytes of the longest message that `try_push` takes.

    Raises:
        RingCorrupted: the segment holds no ring.
        ValueError: the ring is for several readers.
    """

    def __init__(self, view: memoryview, data_bell: Doorbell) -> None:
        self._attach(view, (data_bell,))

    def _attach(self, view: memoryview, bells: Sequence[Doorbell]) -> None:
        self._ring = ring = RingMap(view)
        if len(bells) != ring.num_readers:
            raise ValueError(f"a ring for {ring.num_readers} readers needs as many bells, not {len(bells)}")
        self._words, self._data = ring.words, ring.data
        self._sleepers = tuple((sleeping_word(reader), bell) for reader, bell in enumerate(bells))
        self._first_sleeping = sleeping_word(0)
        self._is_broadcast = len(bells) > 1
        self._fence = fence = Fence()
        # The two halves of the fence in try_push; where one pair is not enough, each is a whole fence.
        self._lock: Callable[[], object] = fence.lock if TOTAL_STORE_ORDER else fence
        self._unlock: Callable[[], object] = fence.unlock if TOTAL_STORE_ORDER else fence
        self.max_message = ring.capacity // 2 - HEADER_BYTES
        # Writes header and payload in one call. Steps in a row are mostly of the same length.
        self._pack = struct.Struct("<II0s").pack_into
        self._packed_length = 0
        self._tail = ring.position(TAIL_WORD)
        self._at = ring.place(self._tail)
        # Bytes from _at on that are known to be free; never more than half the ring, so that the test for
        # room finds messages that are too long as well.
        self._room = 0
        self._wanted = 0
        self._frames = self._pieces_ahead = self._full_count = 0

    def try_push(self, kind: int, parts: Sequence[Buffer]) -> bool:
        """Sends one message, or nothing if there is no room now (False). Hot: once a step.

        Args:
            kind: 1 to 0xFFFE.
            parts: C-contiguous buffers of any format, sent one behind the other.

        Raises:
            ValueError: the message is longer than `max_message`, or a fragmented one is on its way.
            RingCorrupted: the head makes no sense.
        """
        payload = _join(parts)
        length = len(payload)
        size = (length + 15) & -8
        room = self._room - size
        if room < 0:
            if not self._make_room(size):
                return False
            room = self._room - size
        if length != self._packed_length:
            self._pack, self._packed_length = struct.Struct(f"<II{length}s").pack_into, length
        at = self._at
        self._pack(self._data, at, length, kind, payload)
        words = self._words
        if not TOTAL_STORE_ORDER:
            self._fence()
        # No call between these, so a signal handler that raises finds all of it done or nothing.
        self._at = at + size
        self._room = room
        self._tail = words[TAIL_WORD] = self._tail + size
        try:
            self._lock()
        finally:
            self._unlock()
        if words[self._first_sleeping] or self._is_broadcast:
            self._wake_readers()
        self._frames += 1
        return True

    def begin(self, kind: int, parts: Sequence[Buffer]) -> FragmentedPush:
        """Takes the ring for one message of any length, which leaves by `FragmentedPush.advance`.

        Raises:
            ValueError: a fragmented message is already on its way.
        """
        if self._room == _TAKEN:
            raise ValueError("a fragmented message is already on its way")
        self._room = _TAKEN
        return FragmentedPush(self, kind, _join(parts))

    def arm_space(self) -> bool:
        """Asks for a ring of this side's bell when there is room; True: there is none yet, go and wait.

        Room is half the ring, or what the last refused push needs if that is more.
        """
        words = self._words
        wanted = max(self._ring.capacity // 2, self._wanted)
        words[WANTED_WORD] = wanted
        self._fence()
        if self.free_bytes < wanted:
            return True
        words[WANTED_WORD] = 0
        return False

    def disarm_space(self) -> None:
        """Takes `arm_space` back."""
        self._words[WANTED_WORD] = 0

    @property
    def free_bytes(self) -> int:
        """Bytes not in use, padding and headers included."""
        return self._ring.capacity - self._ring.used_bytes(self._tail)

    def statistics(self) -> RingStatistics:
        """What went through since this side was attached."""
        return RingStatistics(
            capacity=self._ring.capacity,
            used_bytes=self._ring.used_bytes(self._tail),
            frames=self._frames,
            messages=self._frames - self._pieces_ahead,
            full_count=self._full_count,
        )

    def _make_room(self, size: int) -> bool:
        """Finds room for a frame of `size` bytes; a few times a lap."""
        ring = self._ring
        if self._room == _TAKEN:
            raise ValueError("a fragmented message is on its way; advance() it to its end first")
        half = ring.capacity // 2
        if size > half:
            raise ValueError(f"a message of more than {self.max_message} bytes must go by begin()")
        if self._at == ring.end:
            self._at = ring.base
        free = self.free_bytes
        to_end = ring.end - self._at
        skip = 0 if size <= to_end else to_end
        if skip + size > free:
            self._room = 0
            self._wanted = skip + size
            self._full_count += 1
            return False
        if skip:
            # Published together with the frame that follows.
            FRAME_HEADER.pack_into(self._data, self._at, skip - HEADER_BYTES, PAD)
            self._tail += skip
            self._at = ring.base
            to_end = ring.capacity
        self._room = min(free - skip, to_end, half)
        self._wanted = 0
        return True

    def _wake_readers(self) -> None:
        words = self._words
        for sleeping, bell in self._sleepers:
            if words[sleeping]:
                words[sleeping] = 0
                bell.ring()


class FragmentedPush:
    """A message of any length on its way into the ring; nothing else can be sent before it is."""

    def __init__(self, writer: RingWriter, kind: int, payload: bytes) -> None:
        self._writer = writer
        self._kind = kind
        self._rest = memoryview(payload)
        # A quarter of the ring at a time: the reader empties one piece while the next is written.
        self._piece_bytes = writer.max_message // 2
        self._flags = MORE

    def advance(self) -> bool:
        """Sends what there is room for; True when all is in the ring. On False: `arm_space` and wait."""
        writer = self._writer
        if not self._flags & MORE:
            return True
        writer._room = 0
        while True:
            piece = self._rest[: self._piece_bytes]
            is_last = len(piece) == len(self._rest)
            flags = self._flags & ~MORE if is_last else self._flags
            if not writer.try_push(self._kind | flags << FLAGS_SHIFT, (piece,)):
                writer._room = _TAKEN
                return False
            if is_last:
                self._rest = memoryview(b"")
                self._flags = 0
                return True
            self._rest = self._rest[self._piece_bytes :]
            self._flags = MORE | CONTINUED
            writer._pieces_ahead += 1


class RingReader:
    """The consumer's side.

    Args:
        view: a formatted segment, format "B".
        space_bell: wakes the producer when it waits for room; None for one that never does.

    Raises:
        RingCorrupted: the segment holds no ring.
    """

    def __init__(self, view: memoryview, space_bell: Doorbell | None) -> None:
        self._attach(view, 0, space_bell)

    def _attach(self, view: memoryview, index: int, space_bell: Doorbell | None) -> None:
        self._ring = ring = RingMap(view)
        if not 0 <= index < ring.num_readers:
            raise ValueError(f"no reader {index} in a ring for {ring.num_readers}")
        self._words, self._data = ring.words, ring.data
        self._base, self._end, self._capacity = ring.base, ring.end, ring.capacity
        self._head, self._sleeping = head_word(index), sleeping_word(index)
        self._space_bell = space_bell
        self._fence = Fence()
        # Where read() goes on; the head stays behind until release().
        self._position = ring.position(self._head)
        self._partial: bytearray | None = None
        self._messages = self._pieces_ahead = 0

    def read(self, limit: int = 256) -> list[tuple[int, memoryview]]:
        """The next messages as `(kind, payload)`, from at most `limit` frames. Hot: once a step.

        Payloads are views into the ring, valid until `release`; a message that came in fragments is a view
        of memory of its own. An empty list does not say that there is nothing to read: `arm` does.

        Raises:
            RingCorrupted: tail or frames make no sense; raised again by every later call.
        """
        position = self._position
        rest = self._words[TAIL_WORD] - position
        if not 0 < rest <= self._capacity:
            return self._read_nothing(rest)
        if not TOTAL_STORE_ORDER:
            self._fence()
        data, end = self._data, self._end
        at = self._base + (position & (self._capacity - 1))
        # Frames lie from `at` to `stop`, and `more` bytes of them from the start of the data on.
        more = at + rest - end if at + rest > end else 0
        stop = at + rest - more
        messages: list[tuple[int, memoryview]] = []
        append = messages.append
        for _ in range(limit):
            length, kind = _unpack_header(data, at)
            start = at + 8
            at = (start + length + 7) & -8
            if 0 < kind < PAD:
                append((kind, data[start : start + length]))
            elif at <= stop:
                self._collect(kind, data[start : start + length], messages)
            if at >= stop:
                if at > stop:
                    raise RingCorrupted(f"a frame of {length} bytes in the last {stop - start}")
                if not more:
                    break
                at = self._base
                stop, more = at + more, 0
        self._position = position + rest - more - (stop - at)
        self._messages += len(messages)
        if not messages:
            self._give_back_pieces(position)
        return messages

    def release(self) -> None:
        """Gives back the room of all that `read` returned; the views must not be used any more."""
        if not TOTAL_STORE_ORDER:
            self._fence()
        words = self._words
        words[self._head] = self._position
        if self._space_bell is not None:
            self._fence()
            if words[WANTED_WORD]:
                self._wake_producer(self._space_bell)

    def arm(self) -> bool:
        """Asks for a ring of this side's bell at the next message; True: there is none yet, go and wait."""
        words = self._words
        words[self._sleeping] = 1
        self._fence()
        if words[TAIL_WORD] == self._position:
            return True
        words[self._sleeping] = 0
        return False

    def disarm(self) -> None:
        """Takes `arm` back."""
        self._words[self._sleeping] = 0

    def statistics(self) -> RingStatistics:
        """What went through since this side was attached."""
        return RingStatistics(
            capacity=self._ring.capacity,
            used_bytes=self._ring.used_bytes(self._words[TAIL_WORD]),
            frames=self._messages + self._pieces_ahead,
            messages=self._messages,
            full_count=0,
        )

    def _read_nothing(self, rest: int) -> list[tuple[int, memoryview]]:
        if rest:
            raise RingCorrupted(f"{rest} bytes to read in a ring of {self._capacity}")
        return []

    def _give_back_pieces(self, position: int) -> None:
        """After a read from `position` that brought only padding and pieces of a message to come."""
        # The message may be longer than the ring, so they must go now; unless an earlier read lent views.
        if self._words[self._head] == position:
            self.release()

    def _collect(self, tag: int, piece: memoryview, messages: list[tuple[int, memoryview]]) -> None:
        """Takes a frame that is not a whole message: padding or a fragment."""
        if tag == PAD:
            return
        flags = tag >> FLAGS_SHIFT
        if not 0 < flags <= MORE | CONTINUED:
            raise RingCorrupted(f"a frame of kind {tag & 0xFFFF} with flags {flags}")
        if not flags & CONTINUED:
            # What is left of an earlier one was cut by the death of its producer.
            self._partial = bytearray(piece)
        elif self._partial is not None:
            self._partial += piece
        else:
            # Its beginning went to a reader that died.
            return
        if flags & MORE:
            self._pieces_ahead += 1
            return
        messages.append((tag & 0xFFFF, memoryview(self._partial)))
        self._partial = None

    def _wake_producer(self, bell: Doorbell) -> None:
        words, ring = self._words, self._ring
        if ring.capacity - ring.used_bytes(words[TAIL_WORD]) >= words[WANTED_WORD]:
            words[WANTED_WORD] = 0
            bell.ring()
