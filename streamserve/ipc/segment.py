"""Shared memory without a name: a memfd, mapped by everyone who inherits its descriptor.

There is nothing in /dev/shm and nothing to unlink: the memory goes when the last process that maps it does,
however that one ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from types import TracebackType
from typing import Self

from streamserve.errors import ConfigError
from streamserve.host_memory import available_bytes


class Segment:
    """A mapped piece of shared memory. Made by `create` it owns the descriptor, by `attach` it borrows it.

    Attributes:
        fd: descriptor of the memory, to be passed to children.
        size: bytes.
        view: all of it, writable, format "B".
    """

    def __init__(self, fd: int, owned: bool) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self._owned = owned
        self.view = memoryview(mmap.mmap(fd, self.size))

    @classmethod
    def create(cls, name: str, size: int) -> Segment:
        """New memory of `size` zero bytes, all of it reserved now.

        Args:
            name: shown in /proc/*/maps; need not be unique.
            size: bytes.

        Raises:
            ConfigError: there is not so much memory.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            _reserve(fd, name, size)
            return cls(fd, owned=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """The memory behind an inherited descriptor, which is left open by `close`."""
        return cls(fd, owned=False)

    def close(self) -> None:
        """Unmaps the memory and leaves an empty view; again does nothing.

        Views that others took of it and still hold (a message not yet released, an array) stay valid: the
        mapping then goes with the last of them.
        """
        mapping = self.view.obj
        # Python refuses while there are views, and unmaps by itself once the last of them is collected.
        with contextlib.suppress(BufferError):
            self.view.release()
            if isinstance(mapping, mmap.mmap):
                mapping.close()
        self.view = memoryview(bytearray())
        if self._owned:
            self._owned = False
            os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reserve(fd: int, name: str, size: int) -> None:
    """Gives `fd` its memory, so that a later store cannot raise SIGBUS."""
    # Linux rather kills a process than refuse memory for a memfd, so ask first.
    available = available_bytes()
    if size > available:
        raise ConfigError(
            f"{name} needs {size} bytes of shared memory, only {available} are available; free memory or "
            "raise the limit of this container"
        )
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise ConfigError(
            f"cannot reserve {size} bytes of shared memory for {name}: {error.strerror}; free memory or "
            "raise the limit of this container"
        ) from error
