"""Log probabilities and token ids: one for each token, with the text of their chunk, and all finite."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamserve.frontend.api import choice as choice_module

EMOJI = "a😊 日本 b"


def content_of(chunks: list[Any]) -> list[Any]:
    """The chat log probabilities of a stream; those of each chunk with text join to it."""
    entries: list[Any] = []
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        if choice["logprobs"] is None:
            assert not choice["delta"].get("content")
            continue
        found = choice["logprobs"]["content"]
        if choice["finish_reason"] is None:
            assert "".join(entry["token"] for entry in found) == choice["delta"]["content"]
        entries += found
    return entries


async def test_a_chat_tells_the_likeliest_tokens(frontend: Any, events: Any) -> None:
    frontend.say("hello world")
    ids = frontend.encode("hello world")
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = (await frontend.chat(**fields)).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"] == len(ids) + 1
    for token, entry in zip(ids, entries, strict=False):
        text = frontend.decode([token])
        assert (entry["token"], entry["logprob"], entry["bytes"]) == (text, -0.5, list(text.encode()))
        first, second = entry["top_logprobs"]
        assert first == {"token": text, "logprob": -0.5, "bytes": list(text.encode())}
        assert second["logprob"] == -1.0
        assert bytes(second["bytes"]) == frontend.service.detokenizers.piece(token + 1).encode()
    # The end of the turn is no text, but it was a choice like any other.
    assert entries[-1]["token"] == "<|im_end|>"
    chunks = events((await frontend.chat(stream=True, **fields)).text)
    assert content_of(chunks) == entries
    assert chunks[-2]["choices"][0]["logprobs"]["content"] == entries[-1:]


@pytest.mark.parametrize(
    ("fields", "num_top"), [({"top_logprobs": 0}, 0), ({}, 0), ({"top_logprobs": 20}, 20)]
)
async def test_how_many_of_the_likeliest(frontend: Any, fields: dict[str, Any], num_top: int) -> None:
    frontend.say("x")
    choice = (await frontend.chat(logprobs=True, **fields)).json()["choices"][0]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [num_top, num_top]


async def test_no_log_probabilities_unless_asked_for(frontend: Any) -> None:
    frontend.say("x")
    for answer in (
        await frontend.chat(),
        await frontend.chat(logprobs=False),
        await frontend.chat(logprobs=None, top_logprobs=0),
        await frontend.complete(),
        await frontend.complete(logprobs=None),
        await frontend.complete(logprobs=False),
    ):
        assert answer.json()["choices"][0]["logprobs"] is None
    assert all(add.params.logprobs is None for add in frontend.engine.adds)


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_characters_made_of_several_tokens(frontend: Any, events: Any, tokens_per_step: int) -> None:
    frontend.engine.tokens_per_step = tokens_per_step
    frontend.say(EMOJI)
    response = await frontend.chat(stream=True, logprobs=True, top_logprobs=1)
    chunks = events(response.text)
    entries = content_of(chunks)
    whole = (await frontend.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]
    assert whole["logprobs"]["content"] == entries
    assert "".join(entry["token"] for entry in entries[:-1]) == EMOJI
    # Only the bytes say what each of the tokens was.
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]) == EMOJI.encode()
    assert "�" not in response.text


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("tokens_per_step", [1, 2, 50])
async def test_held_back_text_holds_its_log_probabilities(
    frontend: Any, events: Any, endpoint: str, tokens_per_step: int
) -> None:
    frontend.engine.tokens_per_step = tokens_per_step
    frontend.say("one two three four")
    ask = frontend.chat if endpoint == "chat" else frontend.complete
    fields = {"stop": ["three four five", "zzz"], "logprobs": True if endpoint == "chat" else 0}
    whole = (await ask(**fields)).json()["choices"][0]
    chunks = events((await ask(stream=True, **fields)).text)
    if endpoint == "chat":
        assert content_of(chunks) == whole["logprobs"]["content"]
        return
    told: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        if choice["logprobs"]:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            for name, values in choice["logprobs"].items():
                told[name] += values
    assert told == whole["logprobs"]
    assert "".join(told["tokens"]) == whole["text"] == "one two three four"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_special_token_before_held_back_text_keeps_its_log_probability(
    frontend: Any, events: Any, endpoint: str, stream: bool
) -> None:
    special = frontend.service.tokenizer.tokenizer.token_to_id("<|im_start|>")
    word = max(frontend.encode("the quick brown fox"), key=lambda token: len(frontend.decode([token])))
    frontend.engine.script = lambda _request: [special, word]
    frontend.engine.odds = lambda token: (-token / 1000, [])
    ask = frontend.chat if endpoint == "chat" else frontend.complete
    fields = {"stop": [frontend.decode([word])[-1] + "QQ"], "max_tokens": 8, "stream": stream}
    response = await ask(logprobs=True if endpoint == "chat" else 0, **fields)
    choices = (
        [chunk["choices"][0] for chunk in events(response.text)[:-1]]
        if stream
        else response.json()["choices"]
    )
    _, entries, _ = told_by(choices)
    logprobs = [entry["logprob"] if endpoint == "chat" else entry[1] for entry in entries]
    assert logprobs == pytest.approx([-special / 1000, -word / 1000] * 4)


async def test_tokens_behind_a_stop_string_are_not_told(frontend: Any) -> None:
    frontend.say("one two three four")
    choice = (await frontend.complete(stop="e f", logprobs=1)).json()["choices"][0]
    assert choice["text"] == "one two thre"
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    chat = (await frontend.chat(stop="e f", logprobs=True)).json()["choices"][0]
    assert "".join(entry["token"] for entry in chat["logprobs"]["content"]) == "one two thre"


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
async def test_a_completion_tells_the_likeliest_and_the_chosen(frontend: Any, num_top: int) -> None:
    ids = frontend.encode("hello world")
    frontend.engine.script = lambda _request: ids
    # The chosen token is the fourth likeliest.
    frontend.engine.odds = lambda token: (
        -4.0,
        [((token + rank - 3) % 400, -1.0 - rank) for rank in range(20)],
    )
    choice = (await frontend.complete(logprobs=num_top, max_tokens=len(ids))).json()["choices"][0]
    told = choice["logprobs"]
    assert told.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert told["tokens"] == [frontend.decode([token]) for token in ids]
    assert told["token_logprobs"] == [-4.0] * len(ids)
    for text, top in zip(told["tokens"], told["top_logprobs"], strict=True):
        assert top[text] == -4.0
        assert len(top) <= max(1, num_top + 1)
        assert num_top > 3 or len(top) == num_top + 1
    for text, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(text)] == text


async def test_the_end_of_the_text_is_nothing_in_a_completion(frontend: Any) -> None:
    frontend.say("ab")
    answer = (await frontend.complete(logprobs=1)).json()
    told = answer["choices"][0]["logprobs"]
    assert "".join(told["tokens"]) == "ab"
    assert len(told["tokens"]) == answer["usage"]["completion_tokens"]
    assert (told["tokens"][-1], told["text_offset"][-1]) == ("", 2)


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_impossible_is_a_number(frontend: Any, stream: bool, value: float) -> None:
    frontend.say("x")
    frontend.engine.odds = lambda token: (value, [(token, value)] * 20)
    fields = {"prompt_logprobs": 1} if not stream else {}
    chat = await frontend.chat(logprobs=True, top_logprobs=1, stream=stream, **fields)
    completion = await frontend.complete(logprobs=1, echo=True, stream=stream, **fields)
    for response in (chat, completion):
        assert response.status_code == 200
        assert "-9999.0" in response.text
        for word in ("Infinity", "NaN", "e+30", "null,null]"):
            assert word not in response.text


async def test_tokens_as_ids(frontend: Any) -> None:
    ids = frontend.encode("ab")
    frontend.engine.script = lambda _request: ids
    fields = {"max_tokens": len(ids), "return_tokens_as_token_ids": True}
    told = (await frontend.complete(logprobs=1, **fields)).json()["choices"][0]["logprobs"]
    assert told["tokens"] == [f"token_id:{token}" for token in ids]
    assert told["top_logprobs"] == [{f"token_id:{token}": -0.5} for token in ids]
    chat = (await frontend.chat(logprobs=True, top_logprobs=1, **fields)).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in chat["content"]] == told["tokens"]
    assert [entry["top_logprobs"][0]["token"] for entry in chat["content"]] == told["tokens"]


async def test_token_ids(frontend: Any, events: Any) -> None:
    frontend.say(EMOJI)
    ids = [*frontend.encode(EMOJI), frontend.engine.facts["eos_token_ids"][0]]
    chat = (await frontend.chat(return_token_ids=True)).json()
    prompt = frontend.engine.adds[0].tokens.tolist()
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == (prompt, ids)
    chunks = events((await frontend.chat(return_token_ids=True, stream=True)).text)[:-1]
    assert chunks[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == ids
    for chunk in chunks[1:-1]:
        shown = chunk["choices"][0]
        assert frontend.decode(shown["token_ids"]) == shown["delta"]["content"]
    completion = (await frontend.complete("hi", return_token_ids=True)).json()["choices"][0]
    assert (completion["prompt_token_ids"], completion["token_ids"]) == (frontend.encode("hi"), ids)
    chunks = events((await frontend.complete("hi", return_token_ids=True, stream=True, n=2)).text)[:-1]
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["prompt_token_ids"] == frontend.encode("hi")
        assert [token for choice in mine for token in choice["token_ids"]] == ids


async def test_token_ids_that_a_stop_string_cut_off_are_told(frontend: Any) -> None:
    frontend.say("one two three four")
    choice = (await frontend.complete(stop="three", return_token_ids=True)).json()["choices"][0]
    assert choice["text"] == "one two "
    ids = frontend.encode("one two three four")
    assert choice["token_ids"] == ids[: len(choice["token_ids"])]
    assert frontend.decode(choice["token_ids"]).startswith("one two three")


# Prompts


def check_offsets(choice: Any) -> None:
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    at = 0
    for text, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert offset == at
        at += len(text)


PROMPTS = ["\n\n 3) Total: 47", "Two plus two is", " a", "日本😊", "<|im_start|>user\nhi<|im_end|>", "x"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_echo_with_log_probabilities(frontend: Any, events: Any, prompt: str, max_tokens: int) -> None:
    ids = frontend.encode(prompt)
    frontend.engine.script = lambda _request: frontend.encode(" one two three four five six")
    fields = {"echo": True, "logprobs": 2, "max_tokens": max_tokens}
    answer = (await frontend.complete(prompt, **fields)).json()
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    check_offsets(choice)
    assert len(told["tokens"]) == len(ids) + max_tokens
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert told["token_logprobs"][1:] == [-0.5] * (len(ids) + max_tokens - 1)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["usage"]["total_tokens"] == len(ids) + max_tokens
    chunks = events((await frontend.complete(prompt, stream=True, **fields)).text)[:-1]
    joined: dict[str, list[Any]] = {name: [] for name in told}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == told
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    # The prompt comes as one chunk, and nothing is made up for its parts.
    assert chunks[0]["choices"][0]["text"] == prompt
    assert all(chunk["choices"][0]["text"] for chunk in chunks[1:-1])


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("n", [1, 2])
async def test_echo_without_log_probabilities(frontend: Any, events: Any, prompt: str, n: int) -> None:
    frontend.say(" end")
    ids = frontend.encode(prompt)
    for prompt_or_ids in (prompt, ids):
        shown = prompt if prompt_or_ids is prompt else frontend.decode(ids)
        answer = (await frontend.complete(prompt_or_ids, echo=True, n=n)).json()
        assert [choice["text"] for choice in answer["choices"]] == [shown + " end"] * n
        assert [choice["logprobs"] for choice in answer["choices"]] == [None] * n
        chunks = events((await frontend.complete(prompt_or_ids, echo=True, n=n, stream=True)).text)[:-1]
        for index in range(n):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in mine) == shown + " end"
    only = (await frontend.complete(prompt, echo=True, max_tokens=0)).json()
    assert only["choices"][0]["text"] == prompt
    assert only["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_where_nothing_is_generated_none_is_the_best(frontend: Any, logprobs: int | None) -> None:
    fields = {"echo": True, "max_tokens": 0, "best_of": 3, "logprobs": logprobs}
    answer = await frontend.complete("hello", **fields)
    assert answer.status_code == 200
    (choice,) = answer.json()["choices"]
    assert (choice["text"], answer.json()["usage"]["completion_tokens"]) == ("hello", 0)
    assert len(frontend.engine.adds) == 1


async def test_a_stop_string_does_not_match_in_or_into_the_prompt(frontend: Any) -> None:
    frontend.say("bc abc")
    choice = (await frontend.complete("xa", echo=True, stop="abc")).json()["choices"][0]
    assert choice["text"] == "xabc "


async def test_a_bos_that_the_tokenizer_adds_is_echoed_as_nothing(run_harness: Any, tokenizer: Any) -> None:
    from tokenizers import Tokenizer, processors

    with_bos = Tokenizer.from_str(tokenizer.to_str())
    with_bos.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    async with run_harness(with_tokenizer=with_bos) as frontend:
        choice = (await frontend.complete("hi", echo=True, logprobs=1, max_tokens=0)).json()["choices"][0]
        assert choice["text"] == "hi"
        check_offsets(choice)
        assert choice["logprobs"]["tokens"][0] == ""
        assert len(choice["logprobs"]["tokens"]) == 1 + len(frontend.encode("hi"))


async def test_leading_spaces_of_a_sentencepiece_echo(run_harness: Any, fallback_tokenizer: Any) -> None:
    async with run_harness(with_tokenizer=fallback_tokenizer) as frontend:
        word = fallback_tokenizer.token_to_id("▁the")
        frontend.engine.script = lambda _request: [word]
        answer = await frontend.complete([word, word], echo=True, logprobs=1, max_tokens=1)
        (choice,) = answer.json()["choices"]
        assert choice["text"] == "the the the"
        check_offsets(choice)


@pytest.mark.parametrize("n", [1, 3])
async def test_prompt_log_probabilities(frontend: Any, n: int) -> None:
    ids = frontend.encode("hello world")
    frontend.engine.odds = lambda token: (
        -7.0,
        [((token + rank + 1) % 400, -1.0 - rank) for rank in range(20)],
    )
    answer = (await frontend.complete("hello world", prompt_logprobs=2, n=n, max_tokens=1)).json()
    first, *others = (choice.get("prompt_logprobs") for choice in answer["choices"])
    assert others == [None] * (n - 1)
    assert len(first) == len(ids)
    assert first[0] is None
    for token, entry in zip(ids[1:], first[1:], strict=True):
        assert entry.keys() == {str(token), str(token + 1), str(token + 2)}
        assert entry[str(token)] == {"logprob": -7.0, "rank": None, "decoded_token": frontend.decode([token])}
        assert (entry[str(token + 1)]["rank"], entry[str(token + 2)]["rank"]) == (1, 2)
    chat = (await frontend.chat(prompt_logprobs=0, n=n, max_tokens=1)).json()
    assert len(chat["prompt_logprobs"]) == len(frontend.engine.adds[-1].tokens)
    assert all("prompt_logprobs" not in choice for choice in chat["choices"])
    # Only one of the choices works it out.
    assert [add.params.prompt_logprobs for add in frontend.engine.adds[-n:]] == [0] + [None] * (n - 1)


async def test_prompt_log_probabilities_are_not_for_streams(frontend: Any) -> None:
    for ask in (frontend.chat, frontend.complete):
        response = await ask(prompt_logprobs=1, stream=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


async def step_by_step(frontend: Any, path: str, body: Any, steps: list[int]) -> Any:
    """The response while the engine makes so many steps before anybody else gets a turn, again and again."""
    engine = frontend.engine
    asked = asyncio.ensure_future(frontend.http.post(path, json=body))
    await engine.until(lambda: len(engine.live) == 1)
    counts = itertools.cycle(steps)
    while not asked.done():
        for _ in range(next(counts)):
            engine.step()
        for _ in range(3):
            await asyncio.sleep(0)
    return await asked


def told_by(choices: list[Any]) -> tuple[str, list[Any], list[int]]:
    """Text, log probabilities and token ids of a choice, from its chunks or from all of it."""
    text, entries, ids = "", [], []
    for choice in choices:
        message = choice.get("delta", choice.get("message", {}))
        own = choice.get("text", message.get("content", ""))
        told = choice["logprobs"] or {}
        if "content" in told:
            entries += told["content"]
        elif told:
            columns = (told[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
            entries += zip(*columns, strict=True)
        if told and "text" in choice:
            assert "".join(told["tokens"]) == own
        text += own
        ids += choice.get("token_ids", [])
    return text, entries, ids


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_any_answer_and_its_stream_tell_the_same(
    frontend: Any, events: Any, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr(choice_module, "MAX_TOLD", data.draw(st.sampled_from([1, 2, 3, 64])))
    pieces = ["ab", "c", " ", "é", "語", "😊", "\n", "the quick", "<|im_start|>", "<|endoftext|>"]
    ids = frontend.encode("".join(data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=12))))
    if data.draw(st.booleans()):
        # Half a character is left.
        del ids[data.draw(st.integers(0, len(ids) - 1))]
    text = frontend.decode(ids)
    engine = frontend.engine
    engine.is_automatic = False
    engine.script = lambda _request: [*ids, engine.facts["eos_token_ids"][0]]
    engine.odds = lambda token: (-token / 1000, [(token, -token / 1000)] * 20)
    is_chat = data.draw(st.booleans())
    start = data.draw(st.integers(0, len(text)))
    found = text[start : start + data.draw(st.integers(1, 4))]
    body = {
        # The first is never complete, and holds back a part of some token.
        "stop": [found + "~", *data.draw(st.sampled_from([[], ["b c"], [found or "c"]]))],
        "return_token_ids": True,
        "include_stop_str_in_output": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
        "max_tokens": data.draw(st.integers(1, 40)),
    }
    if is_chat:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
    else:
        path = "/v1/completions"
        body |= {"prompt": "ab", "logprobs": data.draw(st.integers(0, 3)), "echo": data.draw(st.booleans())}
    steps = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    whole = (await step_by_step(frontend, path, body, steps)).json()
    told = told_by(whole["choices"])
    if not is_chat:
        check_offsets(whole["choices"][0])
    assert len(told[2]) == whole["usage"]["completion_tokens"]
    num_echoed = len(frontend.encode("ab")) if body.get("echo") else 0
    logprobs = [entry["logprob"] if is_chat else entry[1] for entry in told[1][num_echoed:]]
    assert logprobs == [pytest.approx(-token / 1000) for token in told[2][: len(logprobs)]]
    assert len(logprobs) <= len(told[2])
    for own_steps in ([1], steps):
        chunks = events((await step_by_step(frontend, path, {**body, "stream": True}, own_steps)).text)[:-1]
        assert told_by([chunk["choices"][0] for chunk in chunks]) == told
