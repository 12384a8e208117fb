"""Bytes of requests, for clients that do what no HTTP library lets them do."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

WAIT_S = 300.0


def request(path: str, body: dict[str, Any] | bytes, **headers: str) -> bytes:
    """A POST; `headers` are added, with `-` for `_`, and win over those that would be there anyway."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"host": "localhost", "content-type": "application/json", "content-length": str(len(payload))}
    head |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + payload


def upgrade(path: str = "/v1/ws", **headers: str) -> bytes:
    """The request for a WebSocket."""
    head = {
        "host": "localhost",
        "upgrade": "websocket",
        "connection": "Upgrade",
        "sec-websocket-version": "13",
    }
    head |= {"sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    head |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()


def frame(message: dict[str, Any]) -> bytes:
    """A text frame as a client sends it, masked with zeros."""
    return raw_frame(1, json.dumps(message).encode())


def raw_frame(opcode: int, payload: bytes, *, is_last: bool = True) -> bytes:
    """A frame of any kind, masked with zeros; `is_last`: no further piece of its message follows."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    else:
        length = b"\xfe" + size.to_bytes(2) if size < 65536 else b"\xff" + size.to_bytes(8)
    return bytes([opcode | 0x80 * is_last]) + length + b"\0\0\0\0" + payload


def close_code(said: bytes) -> int:
    """The code of the close frame that is the only frame in `said`."""
    assert said[:1] == b"\x88", said[:100]
    return int.from_bytes(said[2:4])


def dial(url: str, receive_buffer: int | None = None) -> socket.socket:
    """A connection to the server."""
    where = httpx.URL(url)
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(WAIT_S)
    connection.connect((where.host, where.port))
    return connection


def open_socket(connection: socket.socket, path: str = "/v1/ws", **headers: str) -> None:
    """Makes a WebSocket of a connection; until the server agrees, a client may not send more."""
    connection.sendall(upgrade(path, **headers))
    said = b""
    while not said.endswith(b"\r\n\r\n"):
        said += connection.recv(1)
        assert said, "the server hung up"
    assert status_of(said) == 101, said


@contextlib.contextmanager
def unread(url: str, sent: bytes, receive_buffer: int = 4096) -> Iterator[socket.socket]:
    """A connection whose answer nobody reads; leaving the context drops it."""
    with dial(url, receive_buffer) as connection:
        connection.sendall(sent)
        yield connection


def num_unsent(connection: socket.socket) -> int:
    """Bytes that the other side has yet to send: a client that does not read leaves them there."""
    ours, theirs = connection.getsockname()[1], connection.getpeername()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, _, queues = line.split()[1:5]
        if (int(local.split(":")[1], 16), int(remote.split(":")[1], 16)) == (theirs, ours):
            return int(queues.split(":")[0], 16)
    raise AssertionError("the connection is gone")


def read_all(connection: socket.socket) -> bytes:
    """What the server says until it closes, or breaks off."""
    # Through a small window it would take its time.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    said = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(2**20):
            said += piece
    return bytes(said)


def status_of(said: bytes) -> int:
    """The status of the first answer in `said`."""
    return int(said.split(b" ", 2)[1])


def error_of(said: bytes) -> dict[str, Any]:
    """The error object of the answer in `said`, which must be the only one."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert said.count(b"HTTP/1.1 ") == 1, said
    assert b"content-type: application/json" in head, said
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["message"]
    return error
