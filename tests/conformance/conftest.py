"""Servers for what must hold on every path, and somebody whose stream nothing may disturb."""

from __future__ import annotations

import threading

import httpx
import pytest
from server import running_server, sse_events


@pytest.fixture(scope="session")
def cramped_server(tiny_model):
    """A server with little of everything: context, KV cache, places in the queue, patience."""
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--max-model-len=512",
        "--num-gpu-blocks-override=64",
        "--max-num-seqs=16",
        "--max-waiting=64",
        "--max-num-batched-tokens=128",
        "--scheduling-policy=priority",
        "--stream-write-timeout=3",
        "--trust-request-chat-template",
        env={"OMP_NUM_THREADS": "2"},
    ) as server:
        yield server


@pytest.fixture
def untouched(tiny_server):
    """The test must neither restart the engine nor end, spoil or hold up somebody else's stream."""
    engine = tiny_server.engine.pid
    stop, is_flowing = threading.Event(), threading.Event()
    spoilt: list[str] = []
    body = {"model": "tiny", "prompt": "canary", "max_tokens": 5000, "ignore_eos": True, "stream": True}

    def read(client: httpx.Client) -> None:
        with client.stream("POST", "/v1/completions", json=body) as response:
            for event in sse_events(response):
                if '"error"' in event:
                    spoilt.append(event)
                is_flowing.set()
                if stop.is_set():
                    return
        if event != "[DONE]":
            spoilt.append(f"the stream ended with {event}")

    def run() -> None:
        with httpx.Client(base_url=tiny_server.url, timeout=300) as client:
            while not stop.is_set():
                read(client)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_flowing.wait(300)
    yield
    is_flowing.clear()
    assert is_flowing.wait(300), "the stream stands still"
    stop.set()
    thread.join(300)
    assert spoilt == []
    assert tiny_server.engine.pid == engine
    assert "Traceback" not in tiny_server.output
