"""A short text for everybody to read at any time: one writer, any number of readers, the newest counts.

    byte 0  length u32 │ 4  CRC-32 of the text u32 │ 8  text

The check sum takes the place of a lock: a reader that looks while the text is being replaced sees that the
two do not fit, and looks again. Nobody is woken by a change.
"""

from __future__ import annotations

import struct
import zlib
from types import TracebackType
from typing import Self

from streamserve.ipc.segment import Segment

_HEADER = struct.Struct("<II")
_ATTEMPTS = 100


class Notice:
    """Written by one process only. A new one is empty.

    Attributes:
        fd: descriptor of its memory, to be passed to children.
        max_bytes: the longest text.
    """

    def __init__(self, segment: Segment) -> None:
        self.fd = segment.fd
        self.max_bytes = segment.size - _HEADER.size
        self._segment = segment

    @classmethod
    def create(cls, name: str, max_bytes: int) -> Notice:
        """A new notice.

        Raises:
            ConfigError: there is no memory for it.
        """
        return cls(Segment.create(name, _HEADER.size + max_bytes))

    @classmethod
    def attach(cls, fd: int) -> Notice:
        """The notice behind an inherited descriptor, which is left open by `close`."""
        return cls(Segment.attach(fd))

    def publish(self, text: bytes) -> None:
        """Replaces the text.

        Raises:
            ValueError: it is too long.
        """
        if len(text) > self.max_bytes:
            raise ValueError(f"{len(text)} bytes are more than the {self.max_bytes} of this notice")
        self._segment.view[_HEADER.size : _HEADER.size + len(text)] = text
        _HEADER.pack_into(self._segment.view, 0, len(text), zlib.crc32(text))

    def read(self) -> bytes:
        """The text as last published; empty if it is being replaced without end."""
        for _ in range(_ATTEMPTS):
            length, checksum = _HEADER.unpack_from(self._segment.view)
            text = bytes(self._segment.view[_HEADER.size : _HEADER.size + length])
            if zlib.crc32(text) == checksum:
                return text
        return b""

    def close(self) -> None:
        """Unmaps the memory; again does nothing."""
        self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
