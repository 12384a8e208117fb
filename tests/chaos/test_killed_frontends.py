"""Frontends killed with -9: their streams are lost, everything else goes on, and another takes the place."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server import PATIENCE_S, RunningServer, load, sse_events, wait_idle, wait_until

ARGUMENTS = ("--dtype=float32", "--served-model-name=tiny", "--num-gpu-blocks-override=5000")
COMPLETIONS = "/v1/completions"


def body(prompt, max_tokens, **more):
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }


@pytest.fixture
def start(tiny_model):
    servers = contextlib.ExitStack()

    def start_one(*arguments):
        server = RunningServer(str(tiny_model), *ARGUMENTS, *arguments, env={"OMP_NUM_THREADS": "1"})
        servers.callback(server.stop, signal.SIGKILL)
        return server.wait_ready()

    with servers:
        yield start_one


class Frontends:
    """The frontend processes of a server, by their numbers."""

    def __init__(self, server, num):
        self.server = server
        self.num = num

    def pids(self, index):
        """Of all that there were, as they became ready."""
        name = "frontend" if self.num == 1 else f"frontend {index}"
        return [int(pid) for pid in re.findall(rf"{name}: ready \(pid (\d+)\)", self.server.output)]

    def now(self, index):
        return psutil.Process(self.pids(index)[-1])

    def kill(self, index):
        """Kills one, and returns when it is gone."""
        victim = self.now(index)
        victim.kill()
        gone = (psutil.NoSuchProcess, psutil.ZombieProcess)
        with contextlib.suppress(*gone):
            victim.wait(PATIENCE_S)

    def wait_for_successor(self, index, count):
        wait_until(lambda: len(self.pids(index)) == count + 1, f"{count} restarts of frontend {index}")

    @contextlib.contextmanager
    def only(self, index):
        """While this lasts, no other accepts connections."""
        others = [self.now(other) for other in range(self.num) if other != index]
        for other in others:
            other.suspend()
        try:
            yield
        finally:
            for other in others:
                other.resume()


class OpenStream(threading.Thread):
    """A client that reads an answer to its end, whatever the end is."""

    def __init__(self, server, request):
        super().__init__(daemon=True)
        self.server = server
        self.request = request
        self.text = ""
        self.is_whole = False
        self.flowing = threading.Event()
        self.start()
        assert self.flowing.wait(PATIENCE_S)

    def run(self):
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.Client(base_url=self.server.url, timeout=PATIENCE_S) as client,
            client.stream("POST", COMPLETIONS, json={**self.request, "stream": True}) as response,
        ):
            for event in sse_events(response):
                if event == "[DONE]":
                    self.is_whole = True
                else:
                    self.text += json.loads(event)["choices"][0]["text"]
                    self.flowing.set()


def answer(server, request):
    response = httpx.post(server.url + COMPLETIONS, json=request, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def metrics(server):
    """All samples by name and labels, and which of them may only grow."""
    samples, growing = {}, set()
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text):
        for sample in family.samples:
            name = (sample.name, *sorted(sample.labels.items()))
            samples[name] = sample.value
            # What is told of a process begins anew with a new process.
            if family.type != "gauge" and not sample.name.startswith("process_"):
                growing.add(name)
    return samples, growing


def of_frontend(samples, name, index):
    return samples[name, ("frontend", str(index))]


def test_the_streams_of_the_other_flow_on_and_another_takes_its_place(start):
    server = start("--api-workers=2")
    frontends = Frontends(server, 2)
    requests = [body(f"{number} is a number, and", 4000) for number in range(2)]
    texts = [answer(server, request) for request in requests]
    with frontends.only(0):
        lost = [OpenStream(server, body(f"{number} is not", 30_000)) for number in range(2)]
    with frontends.only(1):
        living = [OpenStream(server, request) for request in requests]
    before, growing = metrics(server)
    assert [of_frontend(before, "streamserve:streams_open", index) for index in (0, 1)] == [2, 2]
    frontends.kill(0)
    wait_until(lambda: load(server)["running"] == 2, "the engine runs those of the living alone")
    assert all(stream.is_alive() for stream in living)
    for stream in living:
        stream.join(PATIENCE_S)
        assert stream.is_whole
    assert [stream.text for stream in living] == texts
    for stream in lost:
        stream.join(PATIENCE_S)
        assert not stream.is_alive()
        assert not stream.is_whole
    wait_idle(server)
    frontends.wait_for_successor(0, 1)
    with frontends.only(0):
        assert answer(server, requests[0]) == texts[0]
    after, _ = metrics(server)
    assert [of_frontend(after, "streamserve:frontend_restarts_total", index) for index in (0, 1)] == [1, 0]
    assert [of_frontend(after, "streamserve:streams_open", index) for index in (0, 1)] == [0, 0]
    assert {name for name in growing if after[name] < before[name]} == set()
    assert server.stop() == 0


def test_one_that_is_killed_while_there_is_no_engine(start):
    server = start("--api-workers=2")
    frontends = Frontends(server, 2)
    request = body("and then there was", 1500)
    text = answer(server, request)
    with frontends.only(1):
        living = OpenStream(server, request)
    with frontends.only(0):
        lost = OpenStream(server, request)
    server.engine.kill()
    wait_until(lambda: "its requests wait for another" in server.output, "the engine's end is noticed")
    frontends.kill(0)
    frontends.wait_for_successor(0, 1)
    for stream in (living, lost):
        stream.join(PATIENCE_S)
    assert living.is_whole
    assert living.text == text
    assert not lost.is_whole
    with frontends.only(0):
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "it has met the engine")
        assert answer(server, request) == text
    wait_idle(server)
    assert server.stop() == 0


def test_the_only_frontend_is_killed_and_the_next_request_waits_for_another(start):
    server = start()
    frontends = Frontends(server, 1)
    request = body("all alone", 30)
    text = answer(server, request)
    stream = OpenStream(server, body("for long", 20_000))
    frontends.kill(0)
    assert answer(server, request) == text
    stream.join(PATIENCE_S)
    assert not stream.is_whole
    wait_idle(server)
    assert server.stop() == 0


def test_one_that_is_killed_again_and_again_ends_the_server(start):
    server = start("--max-frontend-restarts=2")
    frontends = Frontends(server, 1)
    for count in range(2):
        frontends.kill(0)
        frontends.wait_for_successor(0, count + 1)
    frontends.kill(0)
    assert server.process.wait(PATIENCE_S) == 1
    server.stop()
    said = "error: the frontend was killed by SIGKILL, after 2 restarts in a row (--max-frontend-restarts)"
    assert said in server.output


def test_frontends_killed_while_long_prompts_go_to_the_engine(start):
    server = start("--api-workers=2", "--max-frontend-restarts=100", "--max-num-seqs=4")
    frontends = Frontends(server, 2)
    short = body("a short one", 40)
    text = answer(server, short)
    stop = threading.Event()

    def ask_for_long(number):
        # 1500 tokens, another beginning each time: nothing of it is cached.
        while not stop.is_set():
            prompt = f"{number} {os.urandom(8).hex()} " + "lorem ipsum " * 500
            with contextlib.suppress(httpx.TransportError):
                httpx.post(server.url + COMPLETIONS, json=body(prompt, 3), timeout=PATIENCE_S)

    threads = [threading.Thread(target=ask_for_long, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for count in range(4):
        for index in (0, 1):
            wait_until(lambda: load(server)["running"] > 0, "the engine is busy")
            frontends.kill(index)
        for index in (0, 1):
            frontends.wait_for_successor(index, count + 1)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    for index in (0, 1):
        with frontends.only(index):
            assert answer(server, short) == text
    wait_idle(server)
    assert server.stop() == 0
