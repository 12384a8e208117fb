"""A seeded request gives the same tokens on a second server start."""

from __future__ import annotations

import httpx
from server import running_server

BODY = {
    "model": "tiny",
    "prompt": "The same seed",
    "max_tokens": 40,
    "temperature": 1.0,
    "seed": 1234,
    "ignore_eos": True,
}


def test_the_same_seed_on_two_servers(tiny_server, tiny_model):
    def answer(server):
        return httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=300).json()["choices"][0]["text"]

    first = answer(tiny_server)
    with running_server(str(tiny_model), "--dtype=float32", "--served-model-name=tiny") as other:
        assert answer(other) == first
