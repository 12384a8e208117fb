"""The TCP socket: bound before anything slow, so that a second server on the port fails at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Any

from streamserve.errors import ConfigError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. It listens from the start: two sockets that are only bound may share a port.

    Raises:
        ConfigError: the address does not exist, or the port is taken or not allowed; names the option.
    """
    family, address = _resolve(host, port)
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            option = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise ConfigError(f"{option}: cannot listen on {host} port {port}: {reason}.") from error
        undo.pop_all()
    return listener


def url_of(listener: socket.socket, *, is_tls: bool = False) -> str:
    """The address that `listener` is reached at, with the port it really has."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return (
        f"{scheme}://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"
    )


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    if port > 65535:
        raise ConfigError(f"--port: {port} is above 65535, the highest port.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host: {host!r} is no address of this machine: {error}.") from error
    family, _, _, _, address = found[0]
    return family, address
