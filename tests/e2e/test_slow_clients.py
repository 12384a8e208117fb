"""Clients that send or read too slowly: dropped when their time is over, and at nobody else's cost."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time

import httpx
import pytest
from canary import Canary
from raw_http import WAIT_S, dial, error_of, frame, open_socket, read_all, request, status_of
from server import running_server, wait_idle, wait_until
from ways_in import ALL_WAYS, CHAT, COMPLETION, PATHS, RESPONSE, SOCKET_STREAM, SSE, pose, prompt

ENDPOINTS = pytest.mark.parametrize("endpoint", [CHAT, COMPLETION, RESPONSE])
STREAM_WAYS = [way for way in ALL_WAYS if way[1] in (SSE, SOCKET_STREAM)]
MODEL = {"model": "tiny", "ignore_eos": True, "stream": True}
# With every token much to read.
CHATTY = {
    CHAT: {"n": 4, "logprobs": True, "top_logprobs": 20},
    COMPLETION: {"n": 4, "logprobs": 20},
    RESPONSE: {"include": ["message.output_text.logprobs"], "top_logprobs": 20},
}


def chatty(endpoint, max_tokens):
    limit = "max_output_tokens" if endpoint == RESPONSE else "max_tokens"
    return {**MODEL, **prompt(endpoint, "Go on"), **CHATTY[endpoint], limit: max_tokens}


@pytest.fixture(scope="module")
def server(tiny_model):
    """A server that soon loses patience."""
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=8000",
        "--max-num-seqs=16",
        "--head-timeout=1",
        "--body-timeout=1",
        "--stream-write-timeout=1",
        env={"OMP_NUM_THREADS": "1"},
    ) as server:
        yield server
    assert "Traceback" not in server.output


def drip(connection, data):
    """Sends `data` a byte now and then until an answer comes, and returns that."""
    connection.settimeout(0.1)
    for byte in data:
        connection.sendall(bytes([byte]))
        with contextlib.suppress(TimeoutError):
            said = connection.recv(65536)
            connection.settimeout(WAIT_S)
            return said + read_all(connection)
    raise AssertionError("the server waits for ever")


@ENDPOINTS
def test_a_head_a_byte_at_a_time(server, endpoint):
    with Canary(server.url), dial(server.url) as connection:
        said = drip(connection, request(PATHS[endpoint], {}, x_more="a" * 10_000))
    assert status_of(said) == 408
    assert error_of(said)["code"] == "request_timeout"


def test_a_connection_on_which_nothing_comes(server):
    with Canary(server.url), dial(server.url) as connection:
        assert status_of(read_all(connection)) == 408


@ENDPOINTS
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_a_byte_at_a_time(server, endpoint, is_chunked):
    body = json.dumps({**MODEL, **prompt(endpoint, "x" * 10_000)}).encode()
    head, _, _ = request(PATHS[endpoint], body).partition(b"\r\n\r\n")
    if is_chunked:
        head = head.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with Canary(server.url), dial(server.url) as connection:
        connection.sendall(head + b"\r\n\r\n")
        said = drip(connection, body)
    assert status_of(said) == 408
    assert error_of(said)["code"] == "request_timeout"
    wait_idle(server)


def live_answers(server):
    streams = httpx.get(f"{server.url}/v1/streams", timeout=WAIT_S).raise_for_status().json()["data"]
    return {re.split("[-_]", stream["id"])[-1] for stream in streams}


def note(seen, server):
    """The answers in `seen`, now with those that are live."""
    seen |= live_answers(server)
    return seen


def test_answers_that_nobody_reads(server):
    """Their clients are dropped while others flow, over every path."""
    wait_idle(server)
    with contextlib.ExitStack() as stack:
        canary = stack.enter_context(Canary(server.url))
        unread = {}
        for number, (endpoint, transport) in enumerate(STREAM_WAYS):
            name = f"unread{number}"
            body = {**chatty(endpoint, 15_000), "request_id": name}
            unread[name] = stack.enter_context(pose(server.url, endpoint, transport, body, 4096))
        seen = set()
        wait_until(lambda: unread.keys() <= note(seen, server), "all of them run")
        # Each as soon as all buffers are full, and the time to read some of it is over.
        wait_until(lambda: not unread.keys() & live_answers(server), "all of them are given up")
        canary.wait_more(3)
        for name, connection in unread.items():
            said = read_all(connection)
            for end in (b"[DONE]", b'"type":"done"', b"response.completed", b"response.incomplete"):
                assert end not in said, name
    wait_idle(server)


class SlowReader:
    """A WebSocket client that reads a little at a time, as bytes."""

    def __init__(self, url, body):
        self._connection = dial(url, receive_buffer=4096)
        create = {"type": "create", "id": "slow", "endpoint": COMPLETION, "body": body}
        open_socket(self._connection)
        self._connection.sendall(frame(create))
        self._said = b""

    def read(self, num_bytes):
        self._said += self._connection.recv(num_bytes)

    def messages(self):
        """All messages up to the end of the stream; pings are left out, and need no answer so soon."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        while b'"type":"done"}' not in self._said[-200:]:
            piece = self._connection.recv(2**20)
            assert piece, f"the server hung up: {self._said[-200:]!r}"
            self._said += piece
        self._connection.close()
        rest = self._said
        while rest:
            opcode, size, start = rest[0] & 15, rest[1], 2
            if size >= 126:
                start = 4 if size == 126 else 10
                size = int.from_bytes(rest[2:start])
            payload, rest = rest[start : start + size], rest[start + size :]
            assert opcode in (1, 9), (opcode, payload)
            if opcode == 1:
                yield json.loads(payload)


def check_slow_stream(messages, num_tokens):
    """Nothing of it is missing, whatever was merged meanwhile."""
    *chunks, done = messages
    assert done == {"id": "slow", "type": "done"}
    heard = dict.fromkeys(range(4), 0)
    reasons = []
    for message in chunks:
        for choice in message["chunk"]["choices"]:
            heard[choice["index"]] += len((choice["logprobs"] or {"tokens": []})["tokens"])
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert heard == dict.fromkeys(range(4), num_tokens)
    assert reasons == ["length"] * 4
    most = max(
        len(choice["logprobs"]["tokens"])
        for message in chunks
        for choice in message["chunk"]["choices"]
        if choice["logprobs"]
    )
    assert most > 1, "the reader was never behind"


def fast_stream(server):
    with httpx.stream(
        "POST",
        server.url + PATHS[COMPLETION],
        json={**MODEL, "prompt": "quick", "max_tokens": 40},
        timeout=WAIT_S,
    ) as answer:
        return answer.read().endswith(b"data: [DONE]\n\n")


@pytest.fixture(scope="module")
def patient_server(tiny_model):
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=8000",
        "--max-num-seqs=16",
        env={"OMP_NUM_THREADS": "1"},
    ) as server:
        yield server
    assert "Traceback" not in server.output


def test_a_websocket_that_is_read_slowly(patient_server):
    """Others get whole answers between two little bites, and in the end it has everything."""
    slow = SlowReader(patient_server.url, chatty(COMPLETION, 1000))
    with Canary(patient_server.url) as canary:
        for _ in range(12):
            slow.read(1024)
            before = canary.num_events
            assert fast_stream(patient_server)
            canary.wait_more(1)
            assert canary.num_events > before
    check_slow_stream(list(slow.messages()), 1000)
    wait_idle(patient_server)


@pytest.mark.heavy
def test_a_websocket_that_is_a_minute_behind(patient_server):
    slow = SlowReader(patient_server.url, chatty(COMPLETION, 3000))
    end_s = time.monotonic() + 60
    with Canary(patient_server.url) as canary:
        while time.monotonic() < end_s:
            slow.read(1024)
            before = canary.num_events
            time.sleep(1)
            assert fast_stream(patient_server)
            assert canary.num_events > before
    check_slow_stream(list(slow.messages()), 3000)
    wait_idle(patient_server)
