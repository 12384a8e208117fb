"""A way to a server on which connections break."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Self
from urllib.parse import urlsplit

_RESET = struct.pack("ii", 1, 0)


class CuttingProxy:
    """Passes bytes on, and resets connections.

    Args:
        url: of the server.
        limits: bytes of the server's that each connection carries before it breaks; those after the last one
            carry everything.

    Attributes:
        url: to use instead of the server's.
        num_connections: that were opened.
    """

    def __init__(self, url: str, limits: Iterator[int]) -> None:
        self._port = urlsplit(url).port
        self._limits = limits
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Resets all connections."""
        for each in self._sockets:
            _reset(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            self.num_connections += 1
            self._sockets += [client, server]
            limit = next(self._limits, None)
            for args in ((client, server, None), (server, client, limit)):
                self._threads.append(threading.Thread(target=self._pass, args=args))
                self._threads[-1].start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, limit: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536 if limit is None else min(limit, 65536)):
                target.sendall(data)
                if limit is not None and (limit := limit - len(data)) == 0:
                    _reset(target)
                    _reset(source)
                    return
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def _reset(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        # A thread that reads it wakes by this only.
        each.shutdown(socket.SHUT_RDWR)
    each.close()
