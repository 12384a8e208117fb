"""Connections opened, used and dropped in every state leave everything as it was."""

from __future__ import annotations

import contextlib
import gc
import select
import socket

import httpx
import psutil
import pytest
from raw_http import dial, frame, open_socket, request, upgrade
from server import PATIENCE_S, load, wait_idle, wait_until
from ways_in import CHAT, COMPLETION, PATHS, RESPONSE

BATCH = 100
MAX_GROWTH_BYTES = 30 * 2**20


def completion(max_tokens=20_000, **more):
    body = {"model": "tiny", "prompt": "Go on", "max_tokens": max_tokens, "ignore_eos": True}
    return {**body, **more}


CREATE = {"type": "create", "endpoint": "completions"}
MESSAGES = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 20_000, "ignore_eos": True}
LONG = [5 + number % 400 for number in range(6000)]
COMPLETIONS = PATHS[COMPLETION]
# What is sent, and whether something is read before the connection is dropped. With a hundred at a time and
# sixteen that run, most of those that ask are dropped in the queue, some in prefill, or while they are told.
STATES = {
    "connected": (b"", False),
    "half a head": (request(COMPLETIONS, completion())[:40], False),
    "half a body": (request(COMPLETIONS, completion())[:-10], False),
    "asked": (request(COMPLETIONS, completion(stream=True)), False),
    "asked for one piece": (request(COMPLETIONS, completion()), False),
    "a long prompt": (request(COMPLETIONS, completion(prompt=LONG, stream=True)), False),
    "told": (request(COMPLETIONS, completion(stream=True)), True),
    "told four choices": (request(COMPLETIONS, completion(stream=True, n=4)), True),
    "told with log probabilities": (request(COMPLETIONS, completion(stream=True, logprobs=5)), True),
    "told in a chat": (request(PATHS[CHAT], {**MESSAGES, "stream": True}), True),
    "told a response": (request(PATHS[RESPONSE], {"input": "Go on", "stream": True}), True),
    "short and done": (request(COMPLETIONS, completion(2)), True),
    "refused": (request(COMPLETIONS, completion(-1)), True),
    "half an upgrade": (upgrade()[:60], False),
}
# The same of WebSockets.
SOCKET_STATES = {
    "a socket": (b"", False),
    "a socket with three streams": (
        b"".join(frame({**CREATE, "id": n, "body": completion(stream=n < 2)}) for n in range(3)),
        True,
    ),
    "half a frame": (frame({**CREATE, "id": 1, "body": completion()})[:20], False),
    "a socket of a response": (frame({"type": "response.create", "input": "Go on"}), True),
}
SOCKET_PATHS = {"a socket of a response": "/v1/responses"}


def enter(server, state):
    """A connection in that state, and whether something will be said on it."""
    connection = dial(server.url)
    if state in SOCKET_STATES:
        open_socket(connection, SOCKET_PATHS.get(state, "/v1/ws"))
    sent, is_told = {**STATES, **SOCKET_STATES}[state]
    connection.sendall(sent)
    return connection, is_told


def processes(server):
    return [psutil.Process(server.process.pid), server.engine, server.frontend]


def num_descriptors(server):
    return [process.num_fds() for process in processes(server)]


def drop_batch(server, states):
    """Opens all, sends, reads from those that are to be told something, then drops all at once.

    Half of them are reset, the others closed.
    """
    with contextlib.ExitStack() as stack:
        told = []
        for number, state in enumerate(states):
            connection, is_told = enter(server, state)
            stack.enter_context(connection)
            if number % 2:
                linger = (1).to_bytes(4, "little") + bytes(4)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            if is_told:
                told.append(connection)
        # Those that run fill most places, with others behind them.
        wait_until(lambda: load(server)["running"] >= 10 and load(server)["waiting"] > 0, "they queue")
        ready, _, _ = select.select(told, [], [], PATIENCE_S)
        assert ready
        for connection in ready:
            assert connection.recv(100)


def check(server, num_connections):
    wait_idle(server)
    names = [*STATES, *SOCKET_STATES]
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
    wait_idle(tiny_server)
    before = num_descriptors(tiny_server)
    for state in (*STATES, *SOCKET_STATES):
        connection, is_told = enter(tiny_server, state)
        with connection:
            if is_told:
                assert connection.recv(100)
        wait_idle(tiny_server)
    wait_until(lambda: num_descriptors(tiny_server) == before, "all descriptors are closed")
