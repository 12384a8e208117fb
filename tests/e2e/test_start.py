"""A start in which the model takes long: what is answered meanwhile, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import shutil

import httpx
import psutil
import pytest
from gguf_recipe import GgufRecipe
from server import PATIENCE_S, RunningServer, wait_until

from streamserve.artifacts import resolve_model
from streamserve.config import ModelConfig


@pytest.fixture
def gguf(tmp_path):
    """A model that has to be converted, and the lock that whoever converts it takes."""
    cache = tmp_path / "cache"
    file = GgufRecipe().write(tmp_path / "tiny.gguf")
    environ = {"STREAMSERVE_CACHE": str(cache)}
    entry = resolve_model(ModelConfig(str(file), dtype="float32"), lambda *_: None, environ).path
    shutil.rmtree(entry)
    return file, environ, entry.parent / f".{entry.name}.lock"


@pytest.fixture
def slow(gguf):
    """A server that has got as far as that lock, which somebody else holds."""
    file, environ, lock = gguf
    with contextlib.ExitStack() as resources:
        held = resources.enter_context(lock.open("w"))
        fcntl.flock(held, fcntl.LOCK_EX)
        server = RunningServer(str(file), "--dtype=float32", "--num-gpu-blocks-override=100", env=environ)
        resources.callback(server.stop)
        wait_until(lambda: "waiting for another process" in server.output, "it waits for the lock")
        server.url = address(server)
        yield server, held


def address(server):
    """Where it listens, before it has said so."""
    (listening,) = psutil.Process(server.process.pid).net_connections("tcp")
    assert listening.status == psutil.CONN_LISTEN
    return f"http://127.0.0.1:{listening.laddr.port}"


def get(server, path):
    return httpx.get(server.url + path, timeout=PATIENCE_S)


def test_somebody_answers_while_the_model_is_converted(slow):
    server, held = slow
    assert get(server, "/live").status_code == 200
    for path in ("/ready", "/health"):
        unready = get(server, path)
        assert unready.status_code == 503
        assert unready.json()["status"] == "loading"
        assert "tiny.gguf" in unready.json()["progress"]["stage"]
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE_S)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "service_unavailable_error"
    fcntl.flock(held, fcntl.LOCK_UN)
    wait_until(lambda: get(server, "/ready").status_code == 200, "the server is ready")
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=PATIENCE_S
    )
    assert answer.status_code == 200
    assert len(psutil.Process(server.process.pid).children()) == 2
    assert server.stop() == 0


def test_a_start_can_be_stopped_while_the_model_is_converted(slow):
    server, _ = slow
    assert get(server, "/live").status_code == 200
    children = psutil.Process(server.process.pid).children()
    assert len(children) == 3
    assert server.stop() == 0
    assert not [child for child in children if child.is_running()]
    assert "error" not in server.output
