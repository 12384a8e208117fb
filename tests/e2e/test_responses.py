"""/v1/responses with the `openai` package against the real server."""

from __future__ import annotations

import openai
import pytest

ASKED = {"model": "tiny", "input": "Tell me about rivers.", "max_output_tokens": 20, "temperature": 0}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}


@pytest.fixture(scope="module")
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


def test_it_says_what_a_chat_says(client):
    response = client.responses.create(**ASKED)
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": ASKED["input"]}],
        max_tokens=20,
        temperature=0,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert (response.status == "completed") == (chat.choices[0].finish_reason == "stop")


def test_a_stream_has_the_same_text(client):
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_logprobs_belong_to_the_text(client):
    whole = client.responses.create(**ASKED, **LOGPROBS)
    (part,) = whole.output[0].content
    # Half a character that begins within a token, and that nothing completes, is no token's.
    told = "".join(entry.token for entry in part.logprobs)
    assert part.text in (told, told + "\ufffd")
    assert all(len(entry.top_logprobs) == 3 for entry in part.logprobs)
    for event in client.responses.create(**ASKED, **LOGPROBS, stream=True):
        if event.type == "response.output_text.delta":
            told = "".join(entry.token for entry in event.logprobs)
            assert event.delta in (told, told + "\ufffd")
    (streamed,) = event.response.output[0].content
    assert streamed.text == part.text
    assert [entry.logprob for entry in streamed.logprobs] == pytest.approx(
        [entry.logprob for entry in part.logprobs], abs=1e-3
    )


async def test_async(async_client):
    whole = await async_client.responses.create(**ASKED)
    stream = await async_client.responses.create(**ASKED, stream=True)
    deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


async def test_over_a_websocket(async_client):
    whole = await async_client.responses.create(**ASKED)
    async with async_client.responses.connect() as connection:
        for _ in range(2):
            await connection.response.create(**ASKED)
            deltas = []
            async for event in connection:
                if event.type == "response.output_text.delta":
                    deltas.append(event.delta)
                elif event.type in ("response.completed", "response.incomplete"):
                    break
            assert "".join(deltas) == whole.output_text


def test_refusals_are_bad_requests(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASKED, previous_response_id="resp_1")
    assert refused.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASKED, tools=[{"type": "web_search"}])
    assert refused.value.param == "tools"
