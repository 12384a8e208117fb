"""The `openai` package against the real server: chat and completions, streaming and not."""

from __future__ import annotations

import concurrent.futures

import openai
import pytest


@pytest.fixture(scope="module")
def client(tiny_server):
    with openai.OpenAI(
        base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client


MESSAGES = [{"role": "user", "content": "Tell me about rivers."}]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_streams_the_same_text(client):
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 3, "the answer came in one piece"


def test_completion_streams_the_same_text(client):
    request = {"model": "tiny", "prompt": "Once upon", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**request)
    chunks = client.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_token_ids_as_prompt(client):
    answer = client.completions.create(model="tiny", prompt=[5, 6, 7, 8], max_tokens=5, temperature=0)
    assert answer.usage.prompt_tokens == 4


def test_second_time_is_from_the_cache(client):
    request = {"model": "tiny", "prompt": list(range(10, 110)), "max_tokens": 4, "temperature": 0}
    first = client.completions.create(**request)
    second = client.completions.create(**request)
    assert second.choices[0].text == first.choices[0].text
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 96


def test_a_seed_decides_the_answer(client):
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 1.0}
    one, again, other = (
        client.chat.completions.create(**request, seed=seed).choices[0].message.content for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert caught.value.body["param"] == "model"


def test_thirty_two_streams_equal_their_unstreamed_text(client):
    def request(number):
        return {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"Question {number}: what is {number} squared?"}],
            "max_tokens": 32,
            "temperature": 0,
        }

    def streamed(number):
        chunks = client.chat.completions.create(**request(number), stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(streamed, range(32)))
    for number, text in enumerate(together):
        assert text == client.chat.completions.create(**request(number)).choices[0].message.content
