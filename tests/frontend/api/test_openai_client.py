"""The openai package, unchanged, against the application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest


@pytest.fixture
async def client(run_harness: Any) -> AsyncIterator[tuple[Any, openai.AsyncOpenAI]]:
    async with (
        run_harness() as frontend,
        frontend.served() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60) as client,
    ):
        yield frontend, client


async def test_chat(client: tuple[Any, openai.AsyncOpenAI]) -> None:
    frontend, api = client
    frontend.say("hello 😊 world")
    answer = await api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "hello 😊 world"
    assert answer.choices[0].finish_reason == "stop"
    stream = await api.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "hello 😊 world"
    assert chunks[-1].usage is not None
    assert answer.usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


async def test_completion_and_models(client: tuple[Any, openai.AsyncOpenAI]) -> None:
    frontend, api = client
    frontend.say(" world")
    stream = await api.completions.create(model="tiny", prompt="hello", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == " world"
    assert [model.id async for model in await api.models.list()] == ["tiny"]


async def test_errors_have_their_types(client: tuple[Any, openai.AsyncOpenAI]) -> None:
    _, api = client
    with pytest.raises(openai.BadRequestError) as refused:
        await api.completions.create(model="tiny", prompt="x", max_tokens=0)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        await api.completions.create(model="gpt", prompt="x")


async def test_an_engine_that_dies_raises_in_the_clients_loop(
    client: tuple[Any, openai.AsyncOpenAI],
) -> None:
    frontend, api = client
    frontend.engine.is_automatic = False
    stream_task = api.completions.create(model="tiny", prompt="hello", stream=True, max_tokens=9)
    opening = asyncio.ensure_future(stream_task)
    await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
    frontend.engine.step()
    stream = await opening
    frontend.engine.die(frontend.frontend_bell)
    with pytest.raises(openai.APIError, match="engine died"):
        async for _ in stream:
            pass
