"""The default model behind the real server (`make test-smollm2`)."""

from __future__ import annotations

import concurrent.futures

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


def test_it_knows_its_capital(client):
    model = next(iter(client.models.list())).id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=30,
        temperature=0,
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
