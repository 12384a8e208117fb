"""A server whose model is compiled says what the others say."""

from __future__ import annotations

from pathlib import Path

import httpx
from server import RunningServer, running_server

PROMPTS = ("One", "The river that runs through the old town", "What is a number? " * 20)


def answers(server: RunningServer) -> list[str]:
    body = {"model": "tiny", "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    texts = []
    for prompt in PROMPTS:
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "prompt": prompt}, timeout=300)
        texts.append(answer.json()["choices"][0]["text"])
    return texts


def test_the_same_text(
    tiny_server: RunningServer, tiny_model: Path, cpp_compiler: str, own_cache: Path
) -> None:
    arguments = (str(tiny_model), "--dtype=float32", "--served-model-name=tiny", "--compile=pieces")
    with running_server(*arguments, env={"STREAMSERVE_CACHE": str(own_cache)}) as server:
        assert answers(server) == answers(tiny_server)
        assert "compiled in" in server.output
        assert "from the cache: before the first attention" in server.output
    assert (own_cache / "compiled").is_dir()
