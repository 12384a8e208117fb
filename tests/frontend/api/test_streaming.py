"""What a client reads from a stream, event by event, and that it is what it would have read in one piece."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from typing import Any

import httpx
import orjson
import pytest

from streamserve.errors import InvalidRequest
from streamserve.frontend.api.body import parse_object
from streamserve.frontend.api.sse import LARGE_BYTES, Framing
from streamserve.messages import Finish

EMOJI = "😊👩‍👩‍👧‍👦 日本語 naïve"


def text_of(chunks: list[Any]) -> str:
    parts = []
    for chunk in chunks:
        if chunk == "[DONE]" or not chunk["choices"]:
            continue
        choice = chunk["choices"][0]
        parts.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return "".join(parts)


async def both(frontend: Any, endpoint: str, events: Any, **fields: Any) -> tuple[Any, list[Any]]:
    """The answer in one piece, and the events of the same one as a stream."""
    ask = frontend.chat if endpoint == "chat" else frontend.complete
    whole = await ask(**fields)
    assert whole.status_code == 200, whole.text
    streamed = await ask(stream=True, **fields)
    assert streamed.status_code == 200, streamed.text
    return whole.json(), events(streamed.text)


def text_of_whole(body: Any) -> str:
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


ENDPOINTS = pytest.mark.parametrize("endpoint", ["chat", "completions"])


async def test_a_chat_stream_event_by_event(frontend: Any, events: Any) -> None:
    frontend.say("hello world")
    response = await frontend.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    first, *middle, last = chunks
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    for chunk in middle:
        (choice,) = chunk["choices"]
        assert choice["delta"].keys() == {"content"}
        assert choice["delta"]["content"]
        assert choice["finish_reason"] is None
    assert text_of(chunks) == "hello world"
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    heads = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks}
    assert len(heads) == 1
    (head,) = heads
    assert head[0].startswith("chatcmpl-")
    assert head[1] == "chat.completion.chunk"
    assert head[3] == "tiny"
    assert all(chunk.keys() == {"id", "object", "created", "model", "choices"} for chunk in chunks)


async def test_a_completion_stream_event_by_event(frontend: Any, events: Any) -> None:
    frontend.say(" world")
    *chunks, done = events((await frontend.complete(stream=True)).text)
    assert done == "[DONE]"
    assert text_of(chunks) == " world"
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert all(chunk["id"].startswith("cmpl-") for chunk in chunks)
    assert chunks[-1]["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]
    assert all(chunk["choices"][0]["text"] for chunk in chunks[:-1])


async def test_answers_in_one_piece(frontend: Any) -> None:
    frontend.say("hello world")
    chat = (await frontend.chat()).json()
    assert chat["object"] == "chat.completion"
    assert chat["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    completion = (await frontend.complete()).json()
    assert completion["object"] == "text_completion"
    assert completion["choices"] == [
        {"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}
    ]


@ENDPOINTS
async def test_characters_made_of_several_tokens_arrive_whole(
    frontend: Any, events: Any, endpoint: str
) -> None:
    frontend.say(EMOJI)
    whole, chunks = await both(frontend, endpoint, events, max_tokens=100)
    assert text_of_whole(whole) == text_of(chunks) == EMOJI
    assert not any("�" in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)


@ENDPOINTS
@pytest.mark.parametrize("tokens_per_step", [1, 3, 7])
@pytest.mark.parametrize(
    ("stop", "shown", "reason"),
    [
        ([" four five"], "one two three", " four five"),
        ("e f", "one two thre", "e f"),
        (["five", " fo"], "one two three", " fo"),
        (["ZZZZZZZZ"], "one two three four five", None),
        (["five six"], "one two three four five", None),
        (["o"], "", "o"),
    ],
)
async def test_stop_strings(
    frontend: Any,
    events: Any,
    endpoint: str,
    tokens_per_step: int,
    stop: Any,
    shown: str,
    reason: str | None,
) -> None:
    frontend.engine.tokens_per_step = tokens_per_step
    frontend.say("one two three four five")
    whole, chunks = await both(frontend, endpoint, events, stop=stop, max_tokens=60)
    assert text_of_whole(whole) == shown
    assert text_of(chunks) == shown
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0].get("stop_reason") == reason
    last = chunks[-2]["choices"][0]
    assert (last["finish_reason"], last.get("stop_reason")) == ("stop", reason)


STOPPED = [
    ("e f", False, "one two thre", "e f"),
    ("e f", True, "one two three f", "e f"),
    # One inside the other: the one that is complete first.
    (["three four", "ee"], False, "one two thr", "ee"),
    (["three four", "ee"], True, "one two three", "ee"),
    # Twice in one delta: the first time.
    (["o"], True, "o", "o"),
    (["five!", "never"], True, "one two three four five", None),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("tokens_per_step", [1, 50])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"prompt": ["a", "b"]}, {"return_token_ids": True}])
@pytest.mark.parametrize(("stop", "includes", "shown", "reason"), STOPPED)
async def test_a_stop_string_cuts_alike_on_every_path(
    frontend: Any,
    events: Any,
    path: str,
    tokens_per_step: int,
    more: dict[str, Any],
    stop: Any,
    includes: bool,
    shown: str,
    reason: str | None,
) -> None:
    frontend.engine.tokens_per_step = tokens_per_step
    frontend.say("one two three four five")
    if "chat" in path:
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "e f"}]}
        more = {name: value for name, value in more.items() if name != "prompt"}
    else:
        prompt = {"prompt": "one two thre"}
    body = {**prompt, "stop": stop, "include_stop_str_in_output": includes, "max_tokens": 60, **more}
    whole = (await frontend.http.post(path, json=body)).json()["choices"]
    streamed = events((await frontend.http.post(path, json={**body, "stream": True})).text)
    assert len(whole) == (2 if {"n", "prompt"} & more.keys() else 1)
    for choice in whole:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert (text, choice["finish_reason"], choice.get("stop_reason")) == (shown, "stop", reason)
        mine = [c for c in streamed[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert text_of(mine) == shown
        last = mine[-1]["choices"][0]
        assert (last["finish_reason"], last.get("stop_reason")) == ("stop", reason)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_of_a_stop_token_is_shown_only_on_request(
    frontend: Any, events: Any, stream: bool
) -> None:
    special = frontend.service.tokenizer.tokenizer.token_to_id("<|endoftext|>")
    ids = [*frontend.encode("one"), special, *frontend.encode(" two")]
    frontend.engine.script = lambda _request: ids
    shown = []
    for fields in (
        {},
        {"include_stop_str_in_output": True},
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
        {"skip_special_tokens": False},
    ):
        response = await frontend.complete(stop_token_ids=[special], stream=stream, **fields)
        if stream:
            chunks = events(response.text)
            choice = {**chunks[-2]["choices"][0], "text": text_of(chunks)}
        else:
            choice = response.json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", special)
        shown.append(choice["text"])
    assert shown == ["one", "one", "one<|endoftext|>", "one"]


async def test_a_matched_stop_string_frees_the_request(frontend: Any) -> None:
    frontend.engine.script = lambda _request: frontend.encode("one two three four five six ")
    response = await frontend.complete(stop="three", max_tokens=400)
    assert response.json()["choices"][0]["text"] == "one two "
    await frontend.engine.until(lambda: not frontend.engine.live)
    assert frontend.engine.aborts == [frontend.engine.adds[0].stream]


async def test_held_back_text_makes_no_empty_chunks(frontend: Any, events: Any) -> None:
    frontend.say("a b c d e f g h i j")
    response = await frontend.chat(stream=True, stop=["j k", "never to be seen"])
    chunks = events(response.text)[:-1]
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]]
    assert all(contents)
    assert "".join(contents) == "a b c d e f g h i j"


async def test_a_token_that_completes_nothing_sends_nothing(frontend: Any, events: Any) -> None:
    frontend.say("語")
    chunks = events((await frontend.chat(stream=True)).text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "語"},
        {},
    ]


@ENDPOINTS
async def test_the_tail_is_not_lost_at_the_length_limit(frontend: Any, events: Any, endpoint: str) -> None:
    ids = frontend.encode("one two ZZZ")
    frontend.engine.script = lambda _request: ids
    whole, chunks = await both(frontend, endpoint, events, stop=["ZZZZZZZZ"], max_tokens=len(ids))
    assert text_of_whole(whole) == text_of(chunks) == "one two ZZZ"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_half_a_character_at_the_limit_is_the_same_in_both(frontend: Any, events: Any) -> None:
    ids = frontend.encode("ab😊")
    frontend.engine.script = lambda _request: ids
    whole, chunks = await both(frontend, "completions", events, max_tokens=len(ids) - 1)
    assert text_of_whole(whole) == text_of(chunks) == "ab�"


@ENDPOINTS
async def test_exactly_one_finish_reason(frontend: Any, events: Any, endpoint: str) -> None:
    frontend.say("")
    _, chunks = await both(frontend, endpoint, events)
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert text_of(chunks) == ""


@ENDPOINTS
async def test_usage_comes_only_when_asked_for(frontend: Any, events: Any, endpoint: str) -> None:
    frontend.engine.cached_tokens = 3
    frontend.say("hello world")
    whole, plain = await both(frontend, endpoint, events)
    assert all("usage" not in chunk for chunk in plain[:-1])
    ask = frontend.chat if endpoint == "chat" else frontend.complete
    chunks = events((await ask(stream=True, stream_options={"include_usage": True})).text)
    *ordinary, usage, done = chunks
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in ordinary)
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    counts = usage["usage"]
    assert counts["completion_tokens"] == len(frontend.encode("hello world")) + 1
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    assert counts["prompt_tokens"] == len(frontend.engine.adds[0].tokens)


@ENDPOINTS
async def test_spaces_in_front_and_runs_of_spaces_survive(frontend: Any, events: Any, endpoint: str) -> None:
    text = "    return  1\n\tx"
    frontend.say(text)
    whole, chunks = await both(frontend, endpoint, events)
    assert text_of_whole(whole) == text_of(chunks) == text


async def test_naive_line_splitters_survive(frontend: Any) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x1cf\rg\nh"
    frontend.say(text)
    body = (await frontend.chat(stream=True)).text
    shown = ""
    for line in body.splitlines():
        assert not line or line.startswith("data: ")
        if line and line != "data: [DONE]":
            delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            shown += delta.get("content", "")
    assert shown == text


async def test_nothing_is_sent_before_the_first_output(run_harness: Any) -> None:
    async with run_harness() as frontend, frontend.served() as url:
        frontend.engine.is_automatic = False
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            request = http.build_request(
                "POST",
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 2},
            )
            sending = asyncio.ensure_future(http.send(request, stream=True))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            # Another request on the same loop goes to and fro; the stream has sent no headers meanwhile.
            assert (await http.get("/health")).status_code == 200
            assert not sending.done()
            frontend.engine.step()
            response = await sending
            assert response.status_code == 200
            frontend.engine.step()
            await response.aread()


@ENDPOINTS
async def test_a_failure_before_the_first_output_has_a_status(frontend: Any, endpoint: str) -> None:
    frontend.engine.is_automatic = False
    ask = frontend.chat if endpoint == "chat" else frontend.complete
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask(stream=True))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        frontend.engine.finish(frontend.engine.adds[0].stream, Finish.ERROR)
    response = asked.result()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


@ENDPOINTS
async def test_a_failure_after_the_start_is_the_last_event(frontend: Any, events: Any, endpoint: str) -> None:
    frontend.engine.is_automatic = False
    ask = frontend.chat if endpoint == "chat" else frontend.complete
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask(stream=True))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        frontend.engine.step()
        # The next delta must not be merged with the first, or the failure would come before any event.
        box = frontend.streams.find(frontend.engine.adds[0].stream)
        await frontend.until(lambda: not frontend.client.admission.waiting and box.listener is not None)
        frontend.engine.finish(frontend.engine.adds[0].stream, Finish.ERROR)
    chunks = events(asked.result().text)
    assert chunks[-1]["error"]["code"] == "request_failed"
    assert chunks[-1].keys() == {"error"}
    assert "[DONE]" not in chunks
    assert all(not c["choices"][0]["finish_reason"] for c in chunks[:-1])


async def test_special_tokens_are_shown_only_on_request(frontend: Any) -> None:
    start = frontend.service.tokenizer.tokenizer.token_to_id("<|im_start|>")
    end = frontend.engine.facts["eos_token_ids"][0]
    frontend.engine.script = lambda _request: [*frontend.encode("a"), start, *frontend.encode("b"), end]
    assert (await frontend.complete()).json()["choices"][0]["text"] == "ab"
    shown = await frontend.complete(skip_special_tokens=False)
    assert shown.json()["choices"][0]["text"] == "a<|im_start|>b"


async def test_the_callers_stop_id_ends_the_text_and_is_named(frontend: Any) -> None:
    ids = frontend.encode("one two three")
    frontend.engine.script = lambda _request: ids
    choice = (await frontend.complete(stop_token_ids=[ids[2]])).json()["choices"][0]
    assert choice["text"] == frontend.decode(ids[:2])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[2])


async def test_the_callers_request_id_is_the_answers(frontend: Any) -> None:
    frontend.say("x")
    body = {"prompt": "a"}
    answers = [
        await frontend.http.post("/v1/completions", json=body, headers={"X-Request-Id": name})
        for name in ("mine-1", "mine-1", 'bad" name')
    ]
    assert [answer.json()["id"] for answer in answers[:2]] == ["cmpl-mine-1", "cmpl-mine-1"]
    assert answers[2].json()["id"] != 'cmpl-bad" name'
    assert len({request.stream for request in frontend.engine.adds}) == 3


@pytest.mark.parametrize("padding", [LARGE_BYTES - 3, LARGE_BYTES - 1, LARGE_BYTES, 3 * LARGE_BYTES])
def test_a_large_event_is_one_line_too(padding: int) -> None:
    for unit in ("a", "é", '"\u2028'):
        text = "x" * padding + "\u2028é\x85" + unit * (2 * LARGE_BYTES)
        for value in (text, [text, "é\u2029" * 5, "plain"]):
            event = Framing(names_events=False).events([orjson.dumps(value)]).decode()
            assert len(event.splitlines()) == 2
            assert orjson.loads(event.removeprefix("data: ")) == value


def test_a_large_body_leaves_the_garbage_collector_on() -> None:
    for body in (b'{"a":[' + b"[1]," * 600_000 + b"[1]]}", b'{"a":[' + b"[1]," * 600_000):
        with contextlib.suppress(InvalidRequest):
            assert len(parse_object(body)["a"]) == 600_001
        assert gc.isenabled()
