"""Connections opened, used and dropped in every state leave everything as it was."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import select
import socket

import httpx
import psutil
import pytest
from server import PATIENCE_S, load, wait_idle, wait_until

BATCH = 100
MAX_GROWTH_BYTES = 30 * 2**20


def completion(max_tokens=20_000, **more):
    body = {"model": "tiny", "prompt": "Go on", "max_tokens": max_tokens, "ignore_eos": True}
    return {**body, **more}


def request(body, path="/v1/completions"):
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def frame(message):
    """A text frame as a client sends it, masked with zeros."""
    payload = json.dumps(message).encode()
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else bytes([0x80 | 126, size >> 8, size & 255])
    return b"\x81" + length + b"\0\0\0\0" + payload


def upgrade():
    key = base64.b64encode(bytes(16)).decode()
    return (
        "GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    ).encode()


CREATE = {"type": "create", "endpoint": "completions"}
MESSAGES = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 20_000, "ignore_eos": True}
LONG = [5 + number % 400 for number in range(6000)]
# What is sent, and whether something is read before the connection is dropped. With a hundred at a time and
# sixteen that run, most of those that ask are dropped in the queue, some in prefill, or while they are told.
STATES = {
    "connected": (b"", False),
    "half a head": (request(completion())[:40], False),
    "half a body": (request(completion())[:-10], False),
    "asked": (request(completion(stream=True)), False),
    "asked for one piece": (request(completion()), False),
    "a long prompt": (request(completion(prompt=LONG, stream=True)), False),
    "told": (request(completion(stream=True)), True),
    "told four choices": (request(completion(stream=True, n=4)), True),
    "told with log probabilities": (request(completion(stream=True, logprobs=5)), True),
    "told in a chat": (request({**MESSAGES, "stream": True}, "/v1/chat/completions"), True),
    "told a response": (request({"input": "Go on", "stream": True}, "/v1/responses"), True),
    "short and done": (request(completion(2)), True),
    "refused": (request(completion(-1)), True),
    "a socket": (upgrade(), True),
    "a socket with three streams": (
        upgrade() + b"".join(frame({**CREATE, "id": n, "body": completion(stream=n < 2)}) for n in range(3)),
        True,
    ),
    "half a frame": (upgrade() + frame({**CREATE, "id": 1, "body": completion()})[:20], True),
}


def processes(server):
    return [psutil.Process(server.process.pid), server.engine, server.frontend]


def num_descriptors(server):
    return [process.num_fds() for process in processes(server)]


def drop_batch(server, sizes):
    """Opens all, sends, reads from those that are to be told something, then drops all at once.

    Half of them are reset, the others closed.
    """
    url = httpx.URL(server.url)
    with contextlib.ExitStack() as stack:
        told = {}
        for number, state in enumerate(sizes):
            sent, is_read = STATES[state]
            connection = stack.enter_context(socket.create_connection((url.host, url.port)))
            if number % 2:
                linger = (1).to_bytes(4, "little") + bytes(4)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.sendall(sent)
            if is_read:
                told[connection] = state
        # Those that run fill most places, with others behind them.
        wait_until(lambda: load(server)["running"] >= 10 and load(server)["waiting"] > 0, "they queue")
        ready, _, _ = select.select(list(told), [], [], PATIENCE_S)
        assert ready
        for connection in ready:
            assert connection.recv(100)


def check(server, num_connections):
    wait_idle(server)
    names = list(STATES)
    # Once as a rehearsal: pools and caches have then the size that they keep.
    drop_batch(server, [names[number % len(names)] for number in range(BATCH)])
    wait_idle(server)
    gc.collect()
    before, memory = num_descriptors(server), server.frontend.memory_info().rss
    engine = server.engine.pid
    for _ in range(num_connections // BATCH):
        drop_batch(server, [names[number % len(names)] for number in range(BATCH)])
        wait_idle(server)
    wait_until(lambda: num_descriptors(server) == before, "all descriptors are closed")
    now = load(server)
    assert (now["running"], now["waiting"], now["free_blocks"]) == (0, 0, now["num_blocks"])
    assert abs(server.frontend.memory_info().rss - memory) < MAX_GROWTH_BYTES
    assert server.engine.pid == engine
    assert "Traceback" not in server.output
    answer = httpx.post(f"{server.url}/v1/completions", json=completion(3), timeout=PATIENCE_S)
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_two_hundred(tiny_server):
    check(tiny_server, 200)


@pytest.mark.heavy
def test_a_thousand(tiny_server):
    check(tiny_server, 1000)


def test_each_state_alone(tiny_server):
    """So that no state hides behind the others."""
    url = httpx.URL(tiny_server.url)
    wait_idle(tiny_server)
    before = num_descriptors(tiny_server)
    for sent, is_read in STATES.values():
        with socket.create_connection((url.host, url.port), timeout=PATIENCE_S) as connection:
            connection.sendall(sent)
            if is_read and b"stream" in sent:
                assert connection.recv(100)
        wait_idle(tiny_server)
    wait_until(lambda: num_descriptors(tiny_server) == before, "all descriptors are closed")
