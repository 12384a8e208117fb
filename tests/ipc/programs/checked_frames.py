"""Frames that carry their number and a checksum, for both ends to agree on without talking."""

from __future__ import annotations

import random
import struct
import zlib

HEADER = struct.Struct("<QI")
_POOL = random.Random(7).randbytes(1 << 16)


class FrameMaker:
    """Makes frame after frame of `shortest` to `longest` random bytes behind the header."""

    def __init__(self, seed: int, shortest: int, longest: int, first: int = 0) -> None:
        self._random = random.Random(seed)
        self._shortest, self._longest = shortest, longest
        self.number = first

    def next(self) -> list[bytes]:
        """The parts of the next frame."""
        length = self._shortest + int(self._random.random() * (self._longest - self._shortest + 1))
        begin = int(self._random.random() * (len(_POOL) - length))
        body = _POOL[begin : begin + length]
        header = HEADER.pack(self.number, zlib.crc32(body, self.number & 0xFFFFFFFF))
        self.number += 1
        return [header, body]


def check(payload: memoryview, number: int) -> None:
    """Asserts that `payload` is frame `number`, whole."""
    found, checksum = HEADER.unpack_from(payload)
    assert found == number, f"frame {found} where {number} was due"
    assert zlib.crc32(payload[HEADER.size :], number & 0xFFFFFFFF) == checksum, f"frame {number} is torn"
