"""A doorbell: one process wakes another that waits for it in poll, select or epoll.

It is an eventfd, so any number of rings before the wake-up count as one, and any number of processes may
ring. Whoever looks at rings after each wake-up may share one bell between them.
"""

from __future__ import annotations

import os
import select
from types import TracebackType
from typing import Self


class Doorbell:
    """Rings across processes. The descriptor is non-blocking and fit for `loop.add_reader`.

    One process may wait on it at a time. Made by `create` it owns the descriptor; made by `attach` it
    borrows one that somebody else closes.
    """

    def __init__(self, fd: int, owned: bool) -> None:
        self._fd = fd
        self._owned = owned
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    @classmethod
    def create(cls) -> Doorbell:
        """A new bell; children get its descriptor by `pass_fds`."""
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), owned=True)

    @classmethod
    def attach(cls, fd: int) -> Doorbell:
        """The bell behind an inherited descriptor, which is left open by `close`."""
        return cls(fd, owned=False)

    def fileno(self) -> int:
        """The descriptor, readable while the bell is rung."""
        return self._fd

    def ring(self) -> None:
        """Wakes who waits, or the next one to wait."""
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:
            # The counter is at its limit, and the bell as rung as can be.
            return

    def clear(self) -> None:
        """Forgets all rings so far; after a wake-up, before looking at what it was for."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            # Nobody rang.
            return

    def wait(self, timeout_s: float | None) -> bool:
        """Blocks until rung, then clears; False when `timeout_s` ran out first (None: no limit)."""
        if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            return False
        self.clear()
        return True

    def close(self) -> None:
        """Closes the descriptor if this side made it; again does nothing."""
        if self._owned:
            self._owned = False
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
