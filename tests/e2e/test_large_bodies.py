"""What is too large is answered in such a way that every client gets to read the answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess

import httpx
import pytest
from canary import Canary
from raw_http import dial, error_of, read_all, status_of
from server import PATIENCE_S
from ways_in import PATHS

LIMIT = 2 * 2**20
MOST_MEMORY = 30 * 2**20
# As much as breaks a connection on whose other side nobody reads.
HUGE = b'{"model":"tiny","prompt":"' + b"word " * (27 * 2**20 // 5) + b'"}'
JSON = {"Content-Type": "application/json"}


def by_http_client(url, path):
    connection = http.client.HTTPConnection(httpx.URL(url).netloc.decode(), timeout=PATIENCE_S)
    try:
        connection.request("POST", path, HUGE, JSON)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def by_http_client_in_chunks(url, path):
    connection = http.client.HTTPConnection(httpx.URL(url).netloc.decode(), timeout=PATIENCE_S)
    parts = (HUGE[at : at + 65536] for at in range(0, len(HUGE), 65536))
    try:
        connection.request("POST", path, parts, JSON, encode_chunked=True)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def by_requests(url, path):
    requests = pytest.importorskip("requests")
    answer = requests.post(url + path, data=HUGE, headers=JSON, timeout=PATIENCE_S)
    return answer.status_code, answer.content


def by_httpx(url, path):
    answer = httpx.post(url + path, content=HUGE, headers=JSON, timeout=PATIENCE_S)
    return answer.status_code, answer.content


def by_curl(url, path):
    command = ["curl", "--silent", "--show-error", "--data-binary", "@-", "--write-out", "\n%{http_code}"]
    command += ["--header", "Content-Type: application/json", url + path]
    done = subprocess.run(command, input=HUGE, capture_output=True, timeout=PATIENCE_S, check=True)
    body, _, status = done.stdout.rpartition(b"\n")
    return int(status), body


@pytest.mark.parametrize("path", [*PATHS.values(), "/tokenize"])
@pytest.mark.parametrize(
    "send",
    [by_http_client, by_http_client_in_chunks, by_requests, by_httpx, by_curl],
    ids=lambda f: f.__name__,
)
def test_every_client_reads_that_it_is_too_large(tiny_server, send, path):
    status, body = send(tiny_server.url, path)
    assert status == 413
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "body_too_large")
    assert str(LIMIT) in error["message"]


def flood(server, head, piece, num_bytes):
    """Sends up to that much without an end, and returns what the server says."""
    with dial(server.url) as connection:
        connection.sendall(head)
        # The server may have had enough before.
        with contextlib.suppress(OSError):
            for _ in range(num_bytes // len(piece)):
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


MUCH = 100 * 2**20
CHUNKED = b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("path", [*PATHS.values(), "/v1/ws", "/health"])
@pytest.mark.parametrize(
    "piece", [b"a" * 65536, b"x-more: y\r\n" * 6000], ids=["a header without end", "headers without end"]
)
def test_a_head_without_end_takes_no_memory(tiny_server, path, piece):
    memory = tiny_server.frontend.memory_info().rss
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-long: ".encode()
    with Canary(tiny_server.url):
        said = flood(tiny_server, head, piece, MUCH)
    assert status_of(said) == 431
    assert error_of(said)["code"] == "request_header_fields_too_large"
    assert tiny_server.frontend.memory_info().rss < memory + MOST_MEMORY


@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize("piece", [b"10000\r\n" + b" " * 65536 + b"\r\n", b"1\r\n \r\n" * 10_000])
def test_a_body_without_end_takes_no_memory(tiny_server, path, piece):
    memory = tiny_server.frontend.memory_info().rss
    with Canary(tiny_server.url):
        said = flood(
            tiny_server, f"POST {path} HTTP/1.1\r\nhost: localhost\r\n".encode() + CHUNKED, piece, MUCH
        )
    assert status_of(said) == 413
    assert error_of(said)["code"] == "body_too_large"
    assert tiny_server.frontend.memory_info().rss < memory + MOST_MEMORY
