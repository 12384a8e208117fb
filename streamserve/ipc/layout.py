"""The memory map of a ring, and the order in which its words are written.

A ring carries frames from one producer to `num_readers` readers; the plain ring has one, the broadcast ring
several. Positions count bytes since the ring was made and only grow, so `tail - head` is what is in use and
`position & (capacity - 1)` is the place in the data. Every shared word is an aligned u64 on a cache line pair
of its own (128 bytes: the prefetcher of x86 fetches two lines of 64).

    byte                                                       written by
       0  magic u64, version u64, capacity u64, num_readers u64   creator, once, magic last
     128  tail u64      end of the last whole frame               producer
     256  wanted u64    0: producer is awake                      producer sets; reader or producer clears
                        n: it sleeps until n bytes are free
     384  head u64      reader 0 is done with all before          reader 0
     512  sleeping u64  1: reader 0 must be woken                 reader 0 sets; producer or reader clears
     640  head, sleeping of reader 1, and so on: 256 bytes each
       D  data, `capacity` bytes (a power of two)                 producer

A frame begins at a multiple of 8 and lies in one piece:

     0        4       6        8
     +--------+-------+--------+-----------------------+---------+
     | length | kind  | flags  | payload, length bytes | 0-7 pad |
     | u32    | u16   | u16    |                       |         |
     +--------+-------+--------+-----------------------+---------+

Where the next frame does not fit before the end of the data, a frame of kind PAD fills the rest and the next
one begins at the start. A frame takes at most half of the data, so with its padding it always fits into an
empty ring. Longer messages go as several frames: all but the last carry MORE, all but the first CONTINUED.

Order of the stores. A u64 item of a memoryview cast to "Q" is read and written by one 8-byte move, so no word
is ever seen half written. x86 keeps stores in order and loads in order (TSO) and needs nothing more for:

 1. producer: payload, header, then `tail`. A reader that sees the tail sees whole frames; a producer that is
    killed anywhere before the last store has sent nothing.
 2. reader: reads of the payload, then `head`. The producer that sees the head may overwrite.

x86 may still let a load overtake an earlier store to another word. Both sides of each sleeping flag do just
that, so both have a full fence between the two; whoever comes second then sees what the first one did:

 3. producer: `tail` | fence | load `sleeping`      reader:   `sleeping` = 1 | fence | load `tail`
 4. reader:   `head` | fence | load `wanted`        producer: `wanted` = n   | fence | load `head`

Who wakes the other clears the flag first and rings after that: the other way round, the flag of a later sleep
could be cleared by an earlier ring. A flag cleared by the sleeper itself at worst costs one needless ring.

The fence is the acquire and release of a private, uncontended lock: in CPython these are atomic
read-modify-write instructions, and on x86 each of them is a full fence. On a weakly ordered machine (arm64)
1 and 2 need a fence as well, and a lock must be taken twice: a release followed by an acquire orders what is
before the one with what is after the other.
"""

from __future__ import annotations

import platform
import struct
import threading
from dataclasses import dataclass

from streamserve.errors import StreamserveError

MAGIC = 0x31474E4952535353
VERSION = 1
LINE_BYTES = 128
MIN_CAPACITY = 64
MAX_CAPACITY = 1 << 31

# Indices into the u64 view of a segment.
MAGIC_WORD, VERSION_WORD, CAPACITY_WORD, NUM_READERS_WORD = 0, 1, 2, 3
TAIL_WORD = LINE_BYTES // 8
WANTED_WORD = 2 * LINE_BYTES // 8

# length, tag. The tag is kind and flags in one: kind | flags << FLAGS_SHIFT.
FRAME_HEADER = struct.Struct("<II")
HEADER_BYTES = FRAME_HEADER.size
FLAGS_SHIFT = 16
# The kind of a frame that fills the rest of the data; all messages have lower ones.
PAD = 0xFFFF
MORE = 1
CONTINUED = 2

TOTAL_STORE_ORDER = platform.machine() in {"x86_64", "AMD64", "i686"}


class RingCorrupted(StreamserveError):
    """The shared words or frames of a ring contradict each other, or the segment holds no ring."""


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """What one side of a ring has seen since it was attached.

    Attributes:
        capacity: bytes of data that the ring holds.
        used_bytes: bytes between the slowest head and the tail now.
        frames: frames written or read, without padding.
        messages: messages written or read; a fragmented one counts once.
        full_count: pushes refused for lack of room (0 on a reading side).
    """

    capacity: int
    used_bytes: int
    frames: int
    messages: int
    full_count: int


class Fence:
    """A full memory fence (see the module's text). Hot: once a push, where the two calls stand in line."""

    __slots__ = ("lock", "unlock")

    def __init__(self) -> None:
        lock = threading.Lock()
        self.lock, self.unlock = lock.acquire, lock.release

    def __call__(self) -> None:
        """Nothing before it overtakes anything after it, on any machine."""
        for _ in range(1 if TOTAL_STORE_ORDER else 2):
            # A signal handler that raises between the two must not leave the lock taken. `with` does the
            # same in twice the time.
            try:
                self.lock()
            finally:
                self.unlock()


def head_word(reader: int) -> int:
    """Index of the head of `reader`."""
    return (3 + 2 * reader) * LINE_BYTES // 8


def sleeping_word(reader: int) -> int:
    """Index of the sleeping flag of `reader`."""
    return (4 + 2 * reader) * LINE_BYTES // 8


def data_offset(num_readers: int) -> int:
    """Byte at which the data begins."""
    return (3 + 2 * num_readers) * LINE_BYTES


def segment_bytes(capacity: int, num_readers: int) -> int:
    """Size of a segment for `capacity` bytes of data.

    Raises:
        ValueError: the capacity is no power of two in range, or there is no reader.
    """
    if capacity & (capacity - 1) or not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
        raise ValueError(
            f"ring capacity must be a power of two from {MIN_CAPACITY} to {MAX_CAPACITY}, not {capacity}"
        )
    if num_readers < 1:
        raise ValueError(f"a ring needs a reader, not {num_readers}")
    return data_offset(num_readers) + capacity


def format_segment(view: memoryview, capacity: int, num_readers: int) -> None:
    """Makes an empty ring of `view`; once, by the creator, before anybody attaches.

    Raises:
        ValueError: bad capacity (see `segment_bytes`), or the view is too small for it.
    """
    needed = segment_bytes(capacity, num_readers)
    if len(view) < needed:
        raise ValueError(f"a ring of {capacity} bytes needs a segment of {needed} bytes, not {len(view)}")
    with view[: data_offset(num_readers)] as header, header.cast("Q") as words:
        header[:] = bytes(len(header))
        words[CAPACITY_WORD] = capacity
        words[NUM_READERS_WORD] = num_readers
        words[VERSION_WORD] = VERSION
        words[MAGIC_WORD] = MAGIC


class RingMap:
    """A formatted segment as seen by one side.

    Attributes:
        words: the whole ring as u64 items, for the shared words.
        data: the whole ring as bytes; frames lie from `base` to `end`.
        capacity: `end - base`.
        num_readers: how many heads there are.

    Raises:
        RingCorrupted: there is no ring in the view, or it does not fit.
    """

    def __init__(self, view: memoryview) -> None:
        if len(view) < data_offset(1) + MIN_CAPACITY:
            raise RingCorrupted(f"a segment of {len(view)} bytes holds no ring")
        with view[:LINE_BYTES] as line, line.cast("Q") as words:
            magic, version = words[MAGIC_WORD], words[VERSION_WORD]
            self.capacity, self.num_readers = words[CAPACITY_WORD], words[NUM_READERS_WORD]
        if magic != MAGIC or version != VERSION:
            raise RingCorrupted(f"no ring of version {VERSION} here: magic {magic:#x}, version {version}")
        try:
            self.end = segment_bytes(self.capacity, self.num_readers)
        except ValueError as error:
            raise RingCorrupted(str(error)) from error
        if self.end > len(view):
            raise RingCorrupted(f"a ring of {self.end} bytes in a segment of {len(view)} bytes")
        self.base = self.end - self.capacity
        self.data = view[: self.end]
        self.words = self.data.cast("Q")

    def position(self, word: int) -> int:
        """The head or tail in `word`, for a side that attaches.

        Raises:
            RingCorrupted: no frame can begin there.
        """
        position = self.words[word]
        if position % 8:
            raise RingCorrupted(f"no frame can begin at {position}")
        return position

    def place(self, position: int) -> int:
        """Byte of `data` at which `position` lies."""
        return self.base + (position & (self.capacity - 1))

    def used_bytes(self, tail: int) -> int:
        """Bytes between the slowest reader and `tail`.

        Raises:
            RingCorrupted: more than the ring holds, or less than nothing.
        """
        words = self.words
        head = min(words[head_word(reader)] for reader in range(self.num_readers))
        if not 0 <= tail - head <= self.capacity:
            raise RingCorrupted(f"tail {tail} and head {head} do not fit a ring of {self.capacity} bytes")
        return tail - head
