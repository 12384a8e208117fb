"""Long prompts are worked on off the event loop, and in bounded number."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Tokenising waits until it is set."""
    from streamserve.frontend.text.tokenize import PromptTokenizer

    gate = threading.Event()
    encode = PromptTokenizer.encode

    def slow(self: PromptTokenizer, text: str, *, adds_bos: bool) -> Any:
        if len(text) > 8000:
            assert gate.wait(20)
        return encode(self, text, adds_bos=adds_bos)

    monkeypatch.setattr(PromptTokenizer, "encode", slow)
    return gate


LONG = "hello " * 3000


async def test_others_go_on_meanwhile(run_harness: Any, gate: threading.Event) -> None:
    async with run_harness(max_model_len=100_000, kv_capacity_tokens=100_000) as frontend:
        async with asyncio.TaskGroup() as group:
            long = group.create_task(frontend.complete(LONG, max_tokens=1))
            chat = group.create_task(frontend.chat(LONG, max_tokens=1))
            assert (await frontend.http.get("/health")).status_code == 200
            assert (await frontend.complete("short", max_tokens=2)).status_code == 200
            assert not long.done()
            gate.set()
        assert long.result().status_code == chat.result().status_code == 200
        assert max(len(add.tokens) for add in frontend.engine.adds) > 3000


async def test_requests_being_tokenised_count_as_waiting(run_harness: Any, gate: threading.Event) -> None:
    options = {"max_model_len": 100_000, "kv_capacity_tokens": 100_000, "max_waiting": 3}
    async with run_harness(**options) as frontend, asyncio.TaskGroup() as group:
        long = [group.create_task(frontend.complete(LONG, max_tokens=1)) for _ in range(3)]
        await frontend.until(lambda: frontend.client.admission.waiting == 3)
        assert (await frontend.complete("short")).status_code == 429
        gate.set()
        await asyncio.wait(long)
        assert all(task.result().status_code == 200 for task in long)


async def test_leaving_while_the_prompt_is_tokenised(run_harness: Any, gate: threading.Event) -> None:
    async with run_harness(max_model_len=100_000, kv_capacity_tokens=100_000) as frontend:
        asked = asyncio.ensure_future(frontend.complete(LONG, max_tokens=1))
        await frontend.until(lambda: frontend.client.admission.waiting == 1)
        asked.cancel()
        await asyncio.wait([asked])
        gate.set()
        assert (await frontend.complete("short", max_tokens=1)).status_code == 200
        assert len(frontend.engine.adds) == 1
