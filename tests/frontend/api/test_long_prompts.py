"""Long requests, and long answers, are worked on off the event loop, and in bounded number."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from streamserve.frontend.api import feed, parameters, telling
from streamserve.frontend.text.tokenize import PromptTokenizer


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Tokenising waits until it is set."""
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


Watch = Callable[[Any, str], list[bool]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Notes of each call of a function whether it holds up the event loop."""

    def wrap(owner: Any, name: str) -> list[bool]:
        function = getattr(owner, name)
        calls: list[bool] = []

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append(threading.current_thread() is threading.main_thread())
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)
        return calls

    return wrap


async def test_what_all_prompts_share_is_checked_once_and_off_the_event_loop(
    run_harness: Any, watch: Watch
) -> None:
    calls = [watch(parameters, name) for name in ("token_ids", "logit_bias", "bad_words", "allowed_tokens")]
    lengths = watch(parameters, "check_prompt_length")
    async with run_harness() as frontend:
        response = await frontend.complete(
            ["a"] * 50,
            max_tokens=1,
            n=2,
            allowed_token_ids=[*range(400)],
            logit_bias={str(token): 1 for token in range(400)},
            bad_words=["fox " * 100] * 10,
        )
        assert response.status_code == 200, response.text
        adds = frontend.engine.adds
        assert len(adds) == 100
        # Neither in the frontend nor in the engine is there one for each.
        for name in ("logit_bias", "bad_words", "allowed_token_ids"):
            assert len({id(getattr(add.params, name)) for add in adds}) == 1
    assert calls == [[False, False], [False], [False], [False]]
    assert lengths == [False] * 50


async def test_many_choices_begin_a_few_at_a_time(run_harness: Any) -> None:
    async with run_harness() as frontend:
        frontend.engine.is_automatic = False
        asked = asyncio.ensure_future(frontend.complete([[5]] * 320, max_tokens=1))
        most = before = 0
        while before < 320:
            await asyncio.sleep(0)
            # Sent, whether the engine has looked or not.
            now = len(frontend.streams)
            most, before = max(most, now - before), now
        assert most <= feed.PORTION
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 320)
        while frontend.engine.step():
            pass
        assert len((await asked).json()["choices"]) == 320


async def test_long_bad_words_are_refused_before_they_are_tokenised(frontend: Any, watch: Watch) -> None:
    calls = watch(PromptTokenizer, "words")
    for words in (["x" * 1000] * 5, ["x"] * 129, ["x" * 1025]):
        response = await frontend.complete(bad_words=words)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("bad_words")
    assert not calls
    # These are short, and a great many tokens.
    response = await frontend.complete(bad_words=[chr(0x4E00 + at) * 30 for at in range(128)])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "bad_words")
    assert len(calls) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_echo_is_made_once_and_off_the_event_loop(
    frontend: Any, watch: Watch, events: Any, stream: bool
) -> None:
    calls = watch(telling.PromptTelling, "_make_echo")
    response = await frontend.complete(
        [5, 6] * 100, echo=True, logprobs=20, n=3, max_tokens=1, stream=stream, return_token_ids=True
    )
    assert calls == [False]
    choices = (
        [chunk["choices"][0] for chunk in events(response.text)[:-1]]
        if stream
        else response.json()["choices"]
    )
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["prompt_token_ids"] == [5, 6] * 100
        offsets = [
            offset for choice in mine if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]
        ]
        assert len(offsets) == 201
        assert offsets == sorted(offsets)
        assert mine[0]["logprobs"]["token_logprobs"][:2] == [None, -0.5]


async def test_long_prompt_log_probabilities_are_made_off_the_event_loop(frontend: Any, watch: Watch) -> None:
    calls = watch(telling, "prompt_entries")
    for ask, prompt in ((frontend.chat, "hello " * 50), (frontend.complete, [5, 6] * 100)):
        answer = (await ask(prompt, prompt_logprobs=20, n=2, max_tokens=1)).json()
        entries = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
        assert entries[0] is None
        assert all(len(entry) == 20 for entry in entries[1:])
    assert calls == [False, False]


async def test_long_texts_and_lists_of_ids_are_turned_into_each_other_off_the_event_loop(
    run_harness: Any, watch: Watch
) -> None:
    calls = [
        watch(PromptTokenizer, "encode"),
        watch(PromptTokenizer, "decode"),
        watch(parameters, "token_ids"),
    ]
    async with run_harness(max_model_len=100_000) as frontend:
        answer = (
            await frontend.http.post("/tokenize", json={"prompt": LONG, "return_token_strs": True})
        ).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        back = await frontend.http.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": LONG}
    assert calls == [[False], [False], [False]]
