"""How a frontend opens a connection to another one: through a socket that has no name.

The supervisor makes a pair of sockets for each frontend: the frontend has one end, all others have the other.
Whoever wants to talk makes a pair of its own and sends one end of it over, with what it wants. Nobody outside
can connect, nothing lies in a folder, and since the supervisor holds both ends a frontend that was started
again has the same door.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

MAX_QUESTION_BYTES = 64 * 1024
# So many are let in at a time.
MAX_VISITS = 16
_INT = struct.Struct("i")
_ROOM = socket.CMSG_SPACE(_INT.size)


def make_door() -> tuple[socket.socket, socket.socket]:
    """Both sides of a door: the inside, which one process has, and the outside, which all others have."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Doors:
    """A process's own door, and the way to those of the others.

    Args:
        inside: of its own.
        outsides: of all, by their index.
    """

    def __init__(self, inside: socket.socket, outsides: Sequence[socket.socket]) -> None:
        self._inside = inside
        self._outsides = outsides

    def fileno(self) -> int:
        """Readable when somebody knocks."""
        return self._inside.fileno()

    def knock(self, index: int, question: bytes) -> socket.socket:
        """Asks another one something; returns the socket on which it will answer.

        Raises:
            OSError: too many wait there already.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # socket.send_fds and recv_fds take flags, and do nothing with them.
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(theirs.fileno()))
                self._outsides[index].sendmsg([question], [rights], socket.MSG_DONTWAIT)
            except OSError:
                ours.close()
                raise
        return ours

    def visits(self) -> Iterator[tuple[bytes, socket.socket]]:
        """What is asked, each with the socket to answer on; does not wait.

        Raises:
            EOFError: nobody can knock any more.
        """
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        for _ in range(MAX_VISITS):
            try:
                question, rights, _, _ = self._inside.recvmsg(MAX_QUESTION_BYTES, _ROOM, flags)
            except BlockingIOError:
                return
            if not question:
                raise EOFError
            with contextlib.ExitStack() as unused:
                sockets = [unused.enter_context(found) for found in _sockets_in(rights)]
                # None, where no descriptor was free: the visitor sees that nobody answers.
                if len(sockets) == 1:
                    unused.pop_all()
                    yield question, sockets[0]


def _sockets_in(rights: list[Any]) -> list[socket.socket]:
    return [
        socket.socket(fileno=number)
        for level, kind, data in rights
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (number,) in _INT.iter_unpack(data[: len(data) - len(data) % _INT.size])
    ]
