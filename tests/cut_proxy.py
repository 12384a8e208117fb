"""A TCP proxy whose connections can be cut, for tests of what is lost on the way."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

# Slowly, what the server sends takes seconds rather than milliseconds.
_SLOW_BYTES = 128
_SLOW_PAUSE_S = 0.01


class CutProxy:
    """Passes bytes on between clients and a server until it is told not to.

    Args:
        url: of the server, on this machine.

    Attributes:
        url: of the proxy.
        is_slow: what comes from the server trickles.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_slow = False
        self._is_open = True
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends all connections, and each new one at once."""
        with self._lock:
            self._is_open = False
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def reopen(self) -> None:
        """Takes connections again."""
        self._is_open = True

    def close(self) -> None:
        """Takes no connections any more."""
        self.cut()
        # Wakes the thread that waits for the next one, which closing alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self._is_open:
                client.close()
                continue
            server = socket.create_connection(self._server)
            with self._lock:
                self._sockets |= {client, server}
            open_ends = [client, server]
            for source, sink in ((client, server), (server, client)):
                arguments = (source, sink, source is server, open_ends)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, is_answer: bool, open_ends: list[socket.socket]
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_SLOW_BYTES if is_answer and self.is_slow else 65536):
                sink.sendall(piece)
                if is_answer and self.is_slow:
                    time.sleep(_SLOW_PAUSE_S)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            open_ends.remove(source)
            # Whoever is the last to read closes both.
            if not open_ends:
                for each in (source, sink):
                    self._sockets.discard(each)
                    each.close()


@contextlib.contextmanager
def cut_proxy(url: str) -> Iterator[CutProxy]:
    """A proxy to the server at `url`."""
    proxy = CutProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
