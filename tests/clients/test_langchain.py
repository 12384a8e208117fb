"""LangChain's chat and completion models."""

from __future__ import annotations

import pytest
from server import wait_idle

pytestmark = pytest.mark.clients
langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
QUESTION = "Tell me about rivers."


@pytest.fixture
def settings(tiny_server):
    return {
        "base_url": f"{tiny_server.url}/v1",
        "api_key": "none",
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 20,
        "max_retries": 0,
    }


@pytest.mark.parametrize("is_response", [False, True])
def test_chat(settings, is_response):
    model = langchain_openai.ChatOpenAI(**settings, use_responses_api=is_response, stream_usage=True)
    whole = model.invoke(QUESTION)
    assert whole.text
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(chunks) > 3
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] > 0
    assert joined.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"] > 0


def test_log_probabilities(settings):
    model = langchain_openai.ChatOpenAI(**settings, logprobs=True, top_logprobs=2)
    entries = model.invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


async def test_async_streams_side_by_side(settings, tiny_server):
    model = langchain_openai.ChatOpenAI(**settings)
    answers = await model.abatch([QUESTION] * 8)
    text = "".join([chunk.text async for chunk in model.astream(QUESTION)])
    assert {answer.text for answer in answers} == {text}
    async for chunk in langchain_openai.ChatOpenAI(**{**settings, "max_tokens": 20_000}).astream(QUESTION):
        if chunk.text:
            break
    wait_idle(tiny_server)


def test_completion(settings):
    model = langchain_openai.OpenAI(**settings)
    whole = model.invoke("Once")
    assert whole
    assert "".join(model.stream("Once")) == whole
