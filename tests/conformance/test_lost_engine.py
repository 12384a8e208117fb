"""The engine is given up in the middle of everything: each path says so as an error, none as a success."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import threading

import httpx
import openai
import psutil
import pytest
from server import PATIENCE_S, RunningServer, load, wait_until
from ways_in import ALL_WAYS, CHAT, COMPLETION, WAYS, Refused, ask, prompt
from websockets.sync.client import connect

ARGUMENTS = (
    "--dtype=float32",
    "--served-model-name=tiny",
    "--num-gpu-blocks-override=4000",
    "--max-num-seqs=32",
)
LONG = {"model": "tiny", "max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture
def server(tiny_model):
    server = RunningServer(
        str(tiny_model), *ARGUMENTS, "--engine-failure-grace=60", "--max-engine-restarts=0"
    )
    yield server.wait_ready()
    if server.process.poll() is None:
        server.stop(signal.SIGKILL)


def outcome(server, way, body):
    endpoint, transport = way
    try:
        return ask(server.url, endpoint, transport, {**LONG, **prompt(endpoint, "Go on"), **body})
    except Refused as refused:
        return refused


def own_mode(server):
    """The events of a response over OpenAI's own WebSocket mode."""
    with connect(server.url.replace("http", "ws", 1) + "/v1/responses", max_size=None) as client:
        create = {"type": "response.create", "input": "Go on", "ignore_eos": True, "model": "tiny"}
        client.send(json.dumps(create))
        events = [json.loads(client.recv(PATIENCE_S))]
        while events[-1]["type"] != "response.failed":
            events.append(json.loads(client.recv(PATIENCE_S)))
        return events


def openai_stream(server):
    """The error that OpenAI's own client raises in the middle of a streamed response."""
    base_url = f"{server.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        stream = client.responses.create(
            model="tiny", input="Go on", stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError) as raised:
            list(stream)
        return raised.value


def test_everybody_is_told(server):
    ways = [
        *((way, {}) for way in ALL_WAYS),
        *((way, {"n": 2}) for way in WAYS),
        *((way, {"logprobs": True if way[0] == CHAT else 2}) for way in WAYS),
    ]  # fmt: skip
    descendants = psutil.Process(server.process.pid).children(recursive=True)
    with concurrent.futures.ThreadPoolExecutor(len(ways) + 2) as pool:
        own, client = pool.submit(own_mode, server), pool.submit(openai_stream, server)
        wait_until(lambda: load(server)["running"] == 2, "these run")
        futures = [pool.submit(outcome, server, way, body) for way, body in ways]
        wait_until(lambda: load(server)["running"] >= 30, "most of them run")
        server.engine.send_signal(signal.SIGKILL)
        *_, error, failed = own.result(60)
        assert (error["type"], error["code"], error["message"]) == (
            "error",
            "engine_unavailable",
            "The engine died.",
        )
        assert failed["sequence_number"] == error["sequence_number"] + 1
        raised = client.result(60)
        assert (raised.code, raised.message) == ("engine_unavailable", "The engine died.")
        outcomes = [future.result(60) for future in futures]
        for (way, _), found in zip(ways, outcomes, strict=True):
            assert isinstance(found, Refused), f"{way} ended like a success"
            assert found.is_late or found.status == 503, (way, found)
            assert found.error["code"] == "engine_unavailable", (way, found)
        assert any(found.is_late for found in outcomes)
        for way in ALL_WAYS:
            late = outcome(server, way, {"max_tokens": 3})
            assert isinstance(late, Refused), way
            assert (late.status, late.is_late) == (503, False)
    for path in ("/health", "/ready"):
        assert httpx.get(server.url + path, timeout=PATIENCE_S).status_code == 503
    assert server.stop() not in (0, -signal.SIGTERM)
    assert "Traceback" not in server.output
    psutil.wait_procs(descendants, timeout=60)
    assert not any(process.is_running() for process in descendants)


def test_a_clean_end_leaves_no_word_of_leaks(tiny_model):
    server = RunningServer(str(tiny_model), *ARGUMENTS, "--drain-timeout=2").wait_ready()
    done = threading.Event()

    def stream():
        outcome(server, (COMPLETION, "sse"), {})
        done.set()

    thread = threading.Thread(target=stream)
    thread.start()
    wait_until(lambda: load(server)["running"] == 1, "it runs")
    assert server.stop() == 0
    thread.join(60)
    assert done.is_set()
    for word in ("resource_tracker", "leaked", "exported pointers", "Traceback", "BufferError"):
        assert word not in server.output
