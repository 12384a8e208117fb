"""The end of a connection whose client may still be sending.

Data that comes in on a closed connection resets it, and a client that is reset while it sends never looks
whether there is an answer. So the server says that this was all, and for a while throws away what still
comes.
"""

from __future__ import annotations

import asyncio

MAX_BYTES = 256 * 2**20
MAX_S = 30.0
MAX_SILENCE_S = 5.0


class Farewell:
    """Cuts a connection off once its client is silent or has sent too much for too long.

    A client that has read its answer closes the connection itself.

    Args:
        transport: of the connection; everything that there is to say is written.
        loop: that of the transport.
        half_closes: the connection is closed in the server's own direction; else the client is expected to
            answer to what it was told.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, *, half_closes: bool = True
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._num_bytes = 0
        self._has_heard = False
        self._deadline_s = loop.time() + MAX_S
        if half_closes:
            self.half_close()
        self._timer = loop.call_later(min(MAX_SILENCE_S, MAX_S), self._check)

    def half_close(self) -> None:
        """Has the client read an end behind what was written; over TLS there is no such thing."""
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def hear(self, num_bytes: int) -> None:
        """More came."""
        self._has_heard = True
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_BYTES:
            self._transport.abort()

    def stop(self) -> None:
        """The connection is gone."""
        self._timer.cancel()

    def _check(self) -> None:
        left_s = self._deadline_s - self._loop.time()
        if not self._has_heard or left_s <= 0:
            self._transport.abort()
            return
        self._has_heard = False
        self._timer = self._loop.call_later(min(MAX_SILENCE_S, left_s), self._check)
