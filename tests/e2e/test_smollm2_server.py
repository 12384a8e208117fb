"""The default model behind the real server (`make test-smollm2`)."""

from __future__ import annotations

import concurrent.futures
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server import running_server

pytestmark = pytest.mark.smollm2

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain gravity to a child.",
    "List three fruits.",
    "Say hello in Japanese.",
    "What is 12 times 12?",
    "Write a Python function that reverses a string.",
    "Who wrote Hamlet?",
]


@pytest.fixture(scope="module")
def client():
    with (
        running_server("--dtype=float32", "--max-num-seqs=32") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=1800) as client,
    ):
        yield client


def test_thirty_two_streams_equal_their_unstreamed_text(client):
    model = next(iter(client.models.list())).id

    def request(number):
        question = f"{QUESTIONS[number % 8]} (answer number {number})"
        return {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 40,
            "temperature": 0,
        }

    def streamed(number):
        chunks = list(client.chat.completions.create(**request(number), stream=True))
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(streamed, range(32)))
    whole = [client.chat.completions.create(**request(n)).choices[0].message.content for n in range(32)]
    assert together == whole


def first_question() -> dict[str, Any]:
    """The body of the first request in README."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    return json.loads(re.search(r"-d '(\{.*?\})'", text, re.DOTALL)[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_question_has_an_answer_whatever_the_processor_computes_in(dtype):
    with running_server(f"--dtype={dtype}", "--kv-cache-memory=512M") as server:
        question = {**first_question(), "stream": False}
        for sampling in [{"temperature": 0}, *({"seed": seed} for seed in range(5))]:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=question | sampling, timeout=300)
            (choice,) = answer.json()["choices"]
            assert choice["message"]["content"] == "The capital of Japan is Tokyo."
            assert choice["finish_reason"] == "stop"


def test_answers_that_leave_sampling_open_make_sense(client):
    """At a temperature of 1 a model of this size writes other scripts and does not end."""
    model = next(iter(client.models.list())).id
    for seed in range(5):
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Name a fruit."}],
            max_tokens=200,
            seed=seed,
        )
        assert answer.choices[0].message.content.isascii()
        assert answer.choices[0].finish_reason == "stop"
