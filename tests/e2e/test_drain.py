"""The way out with clients of every kind: who reads is told at the deadline, who does not is dropped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time

import httpx
import psutil
import pytest
from raw_http import dial, num_unsent, open_socket, read_all, request
from server import RunningServer, wait_until
from ways_in import ALL_WAYS, COMPLETION, PATHS, RESPONSE, SOCKET_STREAM, SSE, Refused, ask, pose, prompt

LONG = {"model": "tiny", "max_tokens": 15_000, "ignore_eos": True}
# Much to read for every step of the model.
MUCH = {**LONG, "prompt": "Go on", "n": 4, "logprobs": 20}
NOISE = ("Traceback", "Cancel", "cancelled", "exceeded", "Exception", "Error", "did not finish in time")


@pytest.fixture
def server(tiny_model):
    server = RunningServer(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=8000",
        "--max-num-seqs=32",
        "--drain-timeout=3",
        env={"OMP_NUM_THREADS": "1"},
        has_own_group=True,
    ).wait_ready()
    yield server
    server.stop(signal.SIGKILL)
    print(server.output)


def tokens(server):
    """How many tokens each live answer has come to, by the end of its id."""
    streams = httpx.get(f"{server.url}/v1/streams", timeout=300).raise_for_status().json()["data"]
    return {re.split("[-_]", stream["id"])[-1]: stream["completion_tokens"] for stream in streams}


def is_standing(connection):
    """Whether an answer has been going nowhere for a while: its client does not read."""
    before = num_unsent(connection)
    time.sleep(1)
    return 0 < before == num_unsent(connection)


def read(server, name, way, outcomes):
    endpoint, transport = way
    body = {**LONG, **prompt(endpoint, "Go on"), "request_id": name}
    try:
        outcomes[name] = ask(server.url, endpoint, transport, body)
    except Refused as refused:
        outcomes[name] = refused


def test_readers_are_told_and_others_are_dropped(server):
    outcomes = {}
    readers = [
        threading.Thread(target=read, args=(server, f"reader{number}", way, outcomes))
        for number, way in enumerate(ALL_WAYS)
    ]
    with contextlib.ExitStack() as stack:
        stuck = [
            stack.enter_context(pose(server.url, COMPLETION, transport, MUCH, receive_buffer=4096))
            for transport in (SSE, SOCKET_STREAM)
        ]
        wait_until(lambda: all(map(is_standing, stuck)), "clients stand in the way")
        half = stack.enter_context(dial(server.url))
        half.sendall(request(PATHS[RESPONSE], {"input": "hi"})[:-5])
        stack.enter_context(dial(server.url))
        idle = stack.enter_context(dial(server.url))
        open_socket(idle)
        for reader in readers:
            reader.start()
        names = [f"reader{number}" for number in range(len(ALL_WAYS))]
        wait_until(lambda: all(tokens(server).get(name) for name in names), "all of them hear something")
        assert all(map(is_standing, stuck))
        os.killpg(server.process.pid, signal.SIGTERM)
        for reader in readers:
            reader.join(300)
        assert server.process.wait(300) == 0
        closing = idle.recv(100)
        assert (closing[0], int.from_bytes(closing[2:4])) == (0x88, 1001), "a close frame: going away"
    for name, (_, transport) in zip(names, ALL_WAYS, strict=True):
        told = outcomes[name]
        assert isinstance(told, Refused), "it ended like a success"
        assert told.error["code"] == "engine_unavailable"
        assert told.error["message"] == "The server is shutting down."
        # Who has been told nothing yet is told a status.
        assert told.is_late if transport in (SSE, SOCKET_STREAM) else told.status == 503
    for word in NOISE:
        assert word not in server.output, server.output


def test_a_second_signal_ends_it_at_once(server):
    processes = psutil.Process(server.process.pid).children(recursive=True)
    with pose(server.url, COMPLETION, SSE, {**LONG, "prompt": "Go on"}) as connection:
        assert connection.recv(100)
        for _ in range(2):
            os.killpg(server.process.pid, signal.SIGTERM)
            # Two signals that come together are one.
            wait_until(lambda: "stopping" in server.output, "it has taken notice")
        assert server.process.wait(300) == 128 + signal.SIGTERM
        assert b"[DONE]" not in read_all(connection)
    assert psutil.wait_procs(processes, timeout=300)[1] == []
    for word in ("Traceback", "leaked", "resource_tracker"):
        assert word not in server.output
