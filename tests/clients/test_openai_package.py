"""The `openai` package with its helpers, its raw and streaming responses, and many streams of one client."""

from __future__ import annotations

import asyncio

import openai
import pytest
from server import wait_idle

pytestmark = pytest.mark.clients
ASKED = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me about rivers."}],
    "max_tokens": 20,
    "temperature": 0,
}
# The helpers take an answer that came to its limit for a failure; this one ends by itself.
ENDS = {"extra_body": {"logit_bias": {"2": 100}, "min_tokens": 9}}


@pytest.fixture
def client(tiny_server):
    with openai.OpenAI(
        base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client


@pytest.fixture
async def async_client(tiny_server):
    async with openai.AsyncOpenAI(
        base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client


def test_the_stream_helper_builds_the_whole_answer(client):
    whole = client.chat.completions.create(**ASKED, **ENDS, logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(
        **ASKED, **ENDS, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    tokens = [entry.token for entry in whole.choices[0].logprobs.content]
    assert [entry.token for entry in final.choices[0].logprobs.content] == tokens


def test_the_responses_helper_builds_the_whole_answer(client):
    asked = {
        "model": "tiny",
        "input": "Tell me about rivers.",
        "max_output_tokens": 20,
        "temperature": 0,
        **ENDS,
    }
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == client.responses.create(**asked).output_text


def test_raw_answers_have_the_request_id(client):
    raw = client.chat.completions.with_raw_response.create(**ASKED, extra_headers={"X-Request-Id": "mine"})
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse().id == "chatcmpl-mine"


def test_extra_fields_of_other_servers(client):
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 5}
    answer = client.chat.completions.create(**ASKED, extra_body=extra)
    assert answer.usage.completion_tokens == 20


def test_lists_of_prompts_and_several_choices(client):
    answer = client.completions.create(
        model="tiny", prompt=["One", "Two"], n=2, max_tokens=5, echo=True, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["One", "One", "Two", "Two"]


async def test_async_streams_of_one_client(async_client, tiny_server):
    async def streamed():
        stream = await async_client.chat.completions.create(**ASKED, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    whole = await async_client.chat.completions.create(**ASKED)
    texts = await asyncio.gather(*(streamed() for _ in range(16)))
    assert set(texts) == {whole.choices[0].message.content}
    stream = await async_client.completions.create(model="tiny", prompt="On", max_tokens=20_000, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await asyncio.to_thread(wait_idle, tiny_server)


async def test_errors_have_their_classes(async_client):
    for wrong, error in (
        ({"temperature": 9}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError),
    ):
        with pytest.raises(error) as refused:
            await async_client.chat.completions.create(**{**ASKED, **wrong})
        assert refused.value.param == next(iter(wrong))
        with pytest.raises(error):
            await async_client.chat.completions.create(**{**ASKED, **wrong}, stream=True)
