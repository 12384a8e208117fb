"""Processes killed with -9: nothing is left running, and no client waits in silence."""

from __future__ import annotations

import contextlib
import json
import signal
import threading

import httpx
import psutil
import pytest
from server import RunningServer, sse_events, wait_until

ARGUMENTS = ("--dtype=float32", "--served-model-name=tiny", "--num-gpu-blocks-override=2000")
STREAM = {"model": "tiny", "prompt": "go on", "max_tokens": 20_000, "ignore_eos": True, "stream": True}


@pytest.fixture
def server(tiny_model):
    server = RunningServer(
        str(tiny_model), *ARGUMENTS, "--engine-failure-grace=60", "--max-engine-restarts=0"
    )
    yield server.wait_ready()
    server.stop(signal.SIGKILL)


class OpenStream(threading.Thread):
    """A client in the middle of its answer."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server = server
        self.events: list[str] = []
        self.flowing = threading.Event()
        self.start()
        assert self.flowing.wait(300)

    def run(self):
        # A connection that breaks is an end as well; the tests look at what came before it.
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.Client(base_url=self.server.url, timeout=300) as client,
            client.stream("POST", "/v1/completions", json=STREAM) as response,
        ):
            for event in sse_events(response):
                self.events.append(event)
                self.flowing.set()


def test_the_engine_is_killed_and_there_is_to_be_no_other(server):
    streams = [OpenStream(server) for _ in range(4)]
    server.engine.send_signal(signal.SIGKILL)
    for stream in streams:
        stream.join(60)
        assert not stream.is_alive(), "the stream hangs"
        assert "error" in json.loads(stream.events[-1])
    assert httpx.get(f"{server.url}/health").status_code == 503
    answer = httpx.post(f"{server.url}/v1/completions", json={**STREAM, "stream": False})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"]
    wait_until(lambda: "error: the engine was killed" in server.output, "the supervisor says why")
    assert server.stop() != 0, "a dead engine must not look like a clean exit"


def test_the_supervisor_is_killed(server):
    stream = OpenStream(server)
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) == 2
    server.process.kill()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    stream.join(60)
    assert not stream.is_alive()


def test_sigterm_lets_a_stream_finish(server):
    request = {**STREAM, "max_tokens": 200}
    with (
        httpx.Client(base_url=server.url, timeout=300) as client,
        client.stream("POST", "/v1/completions", json=request) as response,
    ):
        events = sse_events(response)
        next(events)
        server.process.send_signal(signal.SIGTERM)
        assert list(events)[-1] == "[DONE]"
    assert server.process.wait(60) == 0
