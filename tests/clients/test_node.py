"""The openai package for node and Vercel's AI SDK, as npm has them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from server import wait_idle

pytestmark = pytest.mark.clients
HERE = Path(__file__).parent / "node"
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me about rivers."}],
    "max_tokens": 20,
    "temperature": 0,
}


def run(packages, program, server):
    shutil.copy(HERE / program, packages / program)
    command = ["node", program, server.url]
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def expected(tiny_server):
    """The texts of a chat and a completion."""
    chat = httpx.post(f"{tiny_server.url}/v1/chat/completions", json=CHAT, timeout=300).json()
    body = {"prompt": "Once", "max_tokens": 20, "temperature": 0}
    completion = httpx.post(f"{tiny_server.url}/v1/completions", json=body, timeout=300).json()
    return chat, completion["choices"][0]["text"]


def test_openai(tiny_server, packages, expected):
    heard = run(packages, "openai.mjs", tiny_server)
    chat, completion = expected
    text = chat["choices"][0]["message"]["content"]
    assert heard["chat"][0] == heard["chatStream"][0] == heard["chatHelper"] == text
    for _, usage in (heard["chat"], heard["chatStream"]):
        assert usage["completion_tokens"] == chat["usage"]["completion_tokens"]
    assert heard["completion"] == [completion, completion]
    assert heard["response"] == [text, text]
    assert heard["refused"] == [400, "messages", "invalid_request", True]
    wait_idle(tiny_server)


def test_ai_sdk(tiny_server, packages, expected):
    heard = run(packages, "ai_sdk.mjs", tiny_server)
    chat, _ = expected
    choice = chat["choices"][0]
    whole = [choice["message"]["content"], choice["finish_reason"], chat["usage"]["completion_tokens"]]
    assert heard["chat"] == heard["chatStream"] == whole
    # It puts names of roles around the prompt.
    assert heard["completion"][0] == heard["completion"][1] != ""
    assert heard["refused"] == [400, "temperature"]
    assert "error" not in heard
    wait_idle(tiny_server)
