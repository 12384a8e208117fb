"""Why a WebSocket was closed reaches a client that goes on sending and reads only afterwards."""

from __future__ import annotations

import json
import time

import pytest
from raw_http import WAIT_S, close_code, dial, frame, open_socket, raw_frame, read_all, status_of, upgrade
from server import wait_idle

CONTINUATION, TEXT, BINARY, CLOSE, RESERVED = 0, 1, 2, 8, 3
# More than the buffers between client and server hold.
MUCH = 30_000_000
PIECE = raw_frame(CONTINUATION, b"x" * 500_000, is_last=False)
MESSAGE = frame({"type": "ping", "padding": "x" * 500_000})
PATHS = pytest.mark.parametrize("path", ["/v1/ws", "/v1/responses"])
FAULTS = pytest.mark.parametrize(
    ("sent", "codes"),
    [
        (raw_frame(TEXT, b"x" * MUCH), {1009}),
        (raw_frame(TEXT, b"x", is_last=False) + PIECE * 60, {1009}),
        (raw_frame(RESERVED, b"") + MESSAGE * 60, {1002}),
        (raw_frame(BINARY, b"{}") + MESSAGE * 60, {1003}),
        (raw_frame(TEXT, b"\xff\xfe") + MESSAGE * 60, {1007}),
        (raw_frame(BINARY, b"{}") + raw_frame(TEXT, b"x" * MUCH), {1003, 1009}),
    ],
    ids=["long", "pieces", "reserved", "binary", "encoding", "binary-then-long"],
)


def heard(connection):
    """All that comes until the server has no more to say, however it ends."""
    said = b""
    while data := connection.recv(65536):
        said += data
    return said


@PATHS
@FAULTS
def test_a_client_that_sends_on_reads_why_it_was_closed(tiny_server, path, sent, codes):
    for _ in range(8):
        with dial(tiny_server.url) as connection:
            open_socket(connection, path)
            connection.sendall(sent)
            # As a client does that is told so by the first frame that it reads.
            said = connection.recv(4096)
            assert close_code(said) in codes
            connection.sendall(raw_frame(CLOSE, said[2:4]))
            assert heard(connection) == b""
    wait_idle(tiny_server)
    assert "Traceback" not in tiny_server.output


@PATHS
def test_one_that_is_slow_to_send_is_heard_out(tiny_server, path):
    """Longer than the time that an ordinary closing handshake may take, with pauses."""
    with dial(tiny_server.url) as connection:
        open_socket(connection, path)
        connection.sendall(raw_frame(TEXT, b"x" * MUCH)[: MUCH // 2])
        for _ in range(14):
            time.sleep(0.5)
            connection.sendall(b"x" * 100_000)
        assert close_code(connection.recv(4096)) == 1009


@PATHS
def test_one_that_neither_reads_nor_sends_is_dropped(tiny_server, path):
    with dial(tiny_server.url) as connection:
        open_socket(connection, path)
        connection.sendall(raw_frame(BINARY, b"{}"))
        connection.settimeout(WAIT_S)
        assert close_code(connection.recv(4096)) == 1003
        # No answer to it: the server waits some seconds, and then no more.
        assert heard(connection) == b""


@PATHS
def test_a_header_that_is_too_long_for_a_websocket_is_answered(tiny_server, path):
    with dial(tiny_server.url) as connection:
        connection.sendall(upgrade(path, cookie="x" * 10_000) + MESSAGE * 20)
        said = read_all(connection)
        assert status_of(said) == 431
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
