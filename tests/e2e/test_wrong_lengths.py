"""Bodies whose length is not what their head says: one clear answer to each, and no second request in any."""

from __future__ import annotations

import json

import pytest
from canary import Canary
from raw_http import dial, error_of, read_all, request, status_of
from server import running_server, wait_idle
from ways_in import CHAT, COMPLETION, PATHS, RESPONSE, prompt

ENDPOINTS = pytest.mark.parametrize("endpoint", [CHAT, COMPLETION, RESPONSE])
BODIES = {
    endpoint: json.dumps({"model": "tiny", **prompt(endpoint, "hi"), "stream": True}).encode()
    for endpoint in (CHAT, COMPLETION, RESPONSE)
}
LENGTH = b"content-length: "
# What a front server that reads the length in another way might let through behind a body.
SMUGGLED = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server(tiny_model):
    """A server that waits for nobody."""
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=2000",
        "--body-timeout=0.5",
        "--head-timeout=0.5",
        env={"OMP_NUM_THREADS": "1"},
    ) as server:
        yield server
    assert "Traceback" not in server.output


def answer_to(server, sent):
    """All that the server says until it closes, while another stream flows."""
    with Canary(server.url), dial(server.url) as connection:
        connection.sendall(sent)
        return read_all(connection)


def with_length(endpoint, length):
    return request(PATHS[endpoint], BODIES[endpoint], content_length=length)


@ENDPOINTS
@pytest.mark.parametrize(
    "length", ["-5", "abc", "0x20", "+70", "70.0", "", "70, 70", "9" * 400, str(2**64 + 70), "7 0"]
)
def test_a_length_that_is_no_number(server, endpoint, length):
    said = answer_to(server, with_length(endpoint, length))
    assert status_of(said) == 400
    assert error_of(said)["code"] == "bad_request"


@ENDPOINTS
@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 3\r\ncontent-length: ",
        b"transfer-encoding: chunked\r\ncontent-length: ",
        b"transfer-encoding: gzip\r\ncontent-length: ",
        b"transfer-encoding: chunked, identity\r\ncontent-length: ",
        b"content-length : 5\r\ncontent-length: ",
    ],
)
def test_a_length_that_is_contradicted(server, endpoint, lines):
    whole = request(PATHS[endpoint], BODIES[endpoint])
    for sent in (whole.replace(LENGTH, lines), whole.replace(LENGTH, lines) + SMUGGLED):
        said = answer_to(server, sent)
        assert status_of(said) == 400
        assert error_of(said)["code"] == "bad_request"


@ENDPOINTS
def test_a_length_that_is_short(server, endpoint):
    said = answer_to(server, with_length(endpoint, str(len(BODIES[endpoint]) - 10)))
    assert status_of(said) == 400
    assert error_of(said)["code"] == "invalid_request"


@ENDPOINTS
def test_a_length_that_leaves_a_request_behind(server, endpoint):
    """The connection closes before what stands behind the body is taken for a request."""
    said = answer_to(server, with_length(endpoint, str(len(BODIES[endpoint]))) + SMUGGLED)
    assert status_of(said) == 200
    assert said.count(b"HTTP/1.1 ") == 1


@ENDPOINTS
def test_a_length_that_is_long(server, endpoint):
    said = answer_to(server, with_length(endpoint, str(len(BODIES[endpoint]) + 10)))
    assert status_of(said) == 408
    assert error_of(said)["code"] == "request_timeout"
    # Somebody who leaves before is no request at all.
    with dial(server.url) as connection:
        connection.sendall(with_length(endpoint, str(len(BODIES[endpoint]) + 10)))
    wait_idle(server)


@ENDPOINTS
def test_no_length_is_no_body(server, endpoint):
    whole = request(PATHS[endpoint], BODIES[endpoint])
    said = answer_to(server, whole.replace(LENGTH + str(len(BODIES[endpoint])).encode() + b"\r\n", b""))
    assert status_of(said) == 400
    assert error_of(said)["code"] == "invalid_request"
