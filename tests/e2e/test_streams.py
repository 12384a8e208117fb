"""Streams side by side: long prompts, disconnects in every state, and what is left afterwards."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter

import httpx
import pytest
from server import running_server, sse_events, wait_until
from ways_in import ALL_WAYS, pose, prompt

COMPLETIONS = "/v1/completions"


def statistics(server):
    """What the engine last said of itself."""
    return httpx.get(f"{server.url}/load", timeout=300).json()


def wait_idle(server):
    wait_until(
        lambda: (stats := statistics(server))["running"] == 0 and stats["waiting"] == 0, "the engine is idle"
    )


def body(prompt, max_tokens, **more):
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        **more,
    }


class Streamer(threading.Thread):
    """Reads one stream to its end and notes each event in a shared, ordered log."""

    def __init__(self, server, name, request, log):
        super().__init__(daemon=True)
        self.server, self.stream_name, self.request, self.log = server, name, request, log
        self.started = threading.Event()
        self.stop = threading.Event()
        self.failure = None

    def run(self):
        try:
            with (
                httpx.Client(base_url=self.server.url, timeout=300) as client,
                client.stream("POST", COMPLETIONS, json=self.request) as response,
            ):
                assert response.status_code == 200, response.read()
                for event in sse_events(response):
                    self.log.append((self.stream_name, event))
                    self.started.set()
                    if self.stop.is_set():
                        return
        except Exception as error:
            self.failure = error
        finally:
            self.started.set()


def test_a_fifty_thousand_token_prompt_does_not_stop_the_others(tiny_server):
    log = []
    others = [Streamer(tiny_server, n, body(f"stream {n}", 20_000), log) for n in range(8)]
    for other in others:
        other.start()
    for other in others:
        assert other.started.wait(300)
    log.append(("mark", "long prompt sent"))
    long = Streamer(tiny_server, "long", body([i % 400 + 5 for i in range(50_000)], 5), log)
    long.start()
    # Once they have shown that they go on they end, so that the rest of the document need not wait for them.
    while long.is_alive() and not went_on(log):
        time.sleep(0.05)
    for other in others:
        other.stop.set()
    for other in others:
        other.join(300)
    long.join(600)
    assert long.failure is None
    assert [other.failure for other in others] == [None] * 8
    assert went_on(log)
    wait_idle(tiny_server)


def went_on(log):
    """Whether each of the eight had 20 tokens after the long prompt came and before its answer began."""
    names = [name for name, _ in list(log)]
    end = names.index("long") if "long" in names else len(names)
    during = Counter(names[names.index("mark") : end])
    return all(during[number] >= 20 for number in range(8))


@pytest.fixture(scope="module")
def narrow_server(tiny_model):
    """A server that runs two requests at a time, so that others queue."""
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--max-num-seqs=2",
        "--max-num-batched-tokens=64",
        "--num-gpu-blocks-override=5000",
        env={"OMP_NUM_THREADS": "1"},
    ) as server:
        yield server


def posed(server, way, text, max_tokens):
    """A request whose answer nobody reads; closing the context drops the connection."""
    endpoint, transport = way
    fields = {"model": "tiny", "max_tokens": max_tokens, "ignore_eos": True}
    return pose(server.url, endpoint, transport, {**fields, **prompt(endpoint, text)})


@pytest.mark.parametrize("way", ALL_WAYS, ids="-".join)
def test_a_disconnect_frees_the_request_in_every_state(narrow_server, way):
    free = statistics(narrow_server)["num_blocks"]
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(posed(narrow_server, way, "running", 30_000))
        wait_until(lambda: statistics(narrow_server)["running"] == 2, "two requests run")
        with posed(narrow_server, way, "queued", 30_000):
            wait_until(lambda: statistics(narrow_server)["waiting"] == 1, "one request waits")
        wait_until(lambda: statistics(narrow_server)["waiting"] == 0, "the queued request is gone")
        assert statistics(narrow_server)["running"] == 2
    wait_idle(narrow_server)
    # Some thousands of tokens, and sixty-four a step.
    with posed(narrow_server, way, "the old town " * 4000, 5):
        wait_until(lambda: statistics(narrow_server)["running"] == 1, "the long prompt is being read")
    wait_idle(narrow_server)
    stats = statistics(narrow_server)
    assert stats["free_blocks"] == stats["num_blocks"] == free


@pytest.mark.parametrize("way", ALL_WAYS, ids="-".join)
def test_a_fresh_request_does_not_wait_for_those_who_left(narrow_server, way):
    for _ in range(20):
        with posed(narrow_server, way, "impatient", 30_000):
            pass
    answer = httpx.post(
        narrow_server.url + COMPLETIONS, json=body("fresh", 3, stream=False), timeout=300
    ).json()
    assert answer["usage"]["completion_tokens"] == 3
    wait_idle(narrow_server)
