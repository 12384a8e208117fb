"""Which requests are accepted, what reaches the engine of them, and how the others are refused."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from streamserve.config import ApiConfig
from streamserve.frontend.api.parameters import SamplingDefaults
from streamserve.hashing import BlockHasher

USER = [{"role": "user", "content": "hi"}]


def check_error(response: Any, status: int = 400, param: str | None = None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return str(error["message"])


async def check_refused(frontend: Any, path: str, body: dict[str, Any], param: str | None) -> None:
    """Refused alike with and without stream, before the engine sees anything."""
    messages = []
    # What streams cannot have is refused for that reason there.
    for stream in (False,) if "prompt_logprobs" in body else (False, True):
        response = await frontend.http.post(path, json={**body, "stream": stream})
        messages.append(check_error(response, param=param))
    assert len(set(messages)) == 1
    assert not frontend.engine.adds


FIELDS: list[tuple[str, Any, str]] = [
    ("max_tokens", "5", "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("temperature", "hot", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", 1e308, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("top_p", -1, "top_p"),
    ("top_k", 0.01, "top_k"),
    ("top_k", 1e18, "top_k"),
    ("top_k", 10**18, "top_k"),
    ("top_k", -5, "top_k"),
    ("min_p", -1, "min_p"),
    ("min_p", 2, "min_p"),
    ("seed", 2**64, "seed"),
    ("seed", 2**63, "seed"),
    ("seed", -(2**63) - 1, "seed"),
    ("seed", 1e20, "seed"),
    ("seed", 1.5, "seed"),
    ("stop", ["a", "b", "c", "d", "e"], "stop"),
    ("stop", [""], "stop[0]"),
    ("stop", "", "stop[0]"),
    ("stop", 5, "stop"),
    ("stop", ["a", None], "stop[1]"),
    ("stop", "x" * 2000, "stop[0]"),
    ("stop_token_ids", [1, 512], "stop_token_ids"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", [2**70], "stop_token_ids[0]"),
    ("stop_token_ids", [True], "stop_token_ids[0]"),
    ("stop_token_ids", "5", "stop_token_ids"),
    ("min_tokens", -1, "min_tokens"),
    ("min_tokens", "1", "min_tokens"),
    ("ignore_eos", "yes", "ignore_eos"),
    ("skip_special_tokens", 1, "skip_special_tokens"),
    ("priority", 2**31, "priority"),
    ("priority", "high", "priority"),
    ("model", 7, "model"),
    ("stream_options", "usage", "stream_options"),
    ("n", 100000, "n"),
    ("n", 129, "n"),
    ("n", 0, "n"),
    ("n", True, "n"),
    ("n", "1", "n"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
    ("frequency_penalty", "x", "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("repetition_penalty", -1, "repetition_penalty"),
    ("logit_bias", {"cat": 1}, "logit_bias"),
    ("logit_bias", {"512": 3}, "logit_bias"),
    ("logit_bias", {"70512": -50}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"1e3": 1}, "logit_bias"),
    ("logit_bias", {" 5": 1}, "logit_bias"),
    ("logit_bias", {"05": 1}, "logit_bias"),
    ("logit_bias", {"٣": 1}, "logit_bias"),
    ("logit_bias", {"": 1}, "logit_bias"),
    ("logit_bias", {"9" * 5000: 1}, "logit_bias"),
    ("logit_bias", {"5": None}, "logit_bias.5"),
    ("logit_bias", {"5": "1"}, "logit_bias.5"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("logit_bias", {"5": -1e300}, "logit_bias"),
    ("logit_bias", [5], "logit_bias"),
    ("bad_words", [""], "bad_words[0]"),
    ("bad_words", "word", "bad_words"),
    ("bad_words", ["x"] * 129, "bad_words"),
    ("bad_words", [f"{index} x y z " * 20 for index in range(20)], "bad_words"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", [512], "allowed_token_ids"),
    ("allowed_token_ids", [-1], "allowed_token_ids"),
    ("allowed_token_ids", ["1"], "allowed_token_ids"),
    ("allowed_token_ids", "1", "allowed_token_ids"),
    ("allowed_token_ids", [True], "allowed_token_ids"),
    ("allowed_token_ids", [5] * 513, "allowed_token_ids"),
    ("prompt_logprobs", -1, "prompt_logprobs"),
    ("prompt_logprobs", 21, "prompt_logprobs"),
    ("prompt_logprobs", True, "prompt_logprobs"),
    ("response_format", {"type": "json_object"}, "response_format"),
    ("guided_regex", "[a", "guided_regex"),
    ("structured_outputs", {"choice": ["a"]}, "structured_outputs"),
    ("use_beam_search", True, "use_beam_search"),
    ("length_penalty", 2.0, "length_penalty"),
    ("logprob_token_ids", [1], "logprob_token_ids"),
    ("include_stop_str_in_output", "yes", "include_stop_str_in_output"),
    ("spaces_between_special_tokens", 1, "spaces_between_special_tokens"),
    ("cache_salt", "", "cache_salt"),
    ("cache_salt", "x" * 129, "cache_salt"),
    ("cache_salt", 5, "cache_salt"),
    ("max_queue_time", -1, "max_queue_time"),
    ("max_queue_time", 0, "max_queue_time"),
    ("max_queue_time", "soon", "max_queue_time"),
    ("truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
    ("truncate_prompt_tokens", -2, "truncate_prompt_tokens"),
    ("truncation_side", "middle", "truncation_side"),
    ("request_id", "no spaces please", "request_id"),
    ("user", 5, "user"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_bad_fields_are_named(frontend: Any, path: str) -> None:
    prompt = {"messages": USER} if "chat" in path else {"prompt": "hi"}
    for name, value, param in FIELDS:
        await check_refused(frontend, path, {**prompt, name: value}, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"messages": USER * 4097}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4096}]}, "messages"),
        ({"documents": [{}] * 4097}, "documents"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": 5, "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
async def test_bad_chat_fields_are_named(frontend: Any, fields: dict[str, Any], param: str) -> None:
    await check_refused(frontend, "/v1/chat/completions", {"messages": USER, **fields}, param)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt"),
        ([[]], "prompt"),
        (["a", ""], "prompt"),
        ([[1], []], "prompt"),
        ([[1], "a"], "prompt"),
        (["a"] * 1025, "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([1, "a"], "prompt"),
        (["a", 1], "prompt"),
        ([1.5], "prompt"),
        ([True], "prompt"),
        ([1, None], "prompt"),
        ([1, [2]], "prompt"),
        ([["a"]], "prompt"),
        ([1, 2, 999999], "prompt"),
        ([512], "prompt"),
        ([-1], "prompt"),
        ([2**62], "prompt"),
        ([2**70], "prompt"),
    ],
)
async def test_bad_prompts(frontend: Any, prompt: Any, param: str) -> None:
    await check_refused(frontend, "/v1/completions", {"prompt": prompt}, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 129, "n": 129}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": 1}, "echo"),
    ],
)
async def test_bad_completion_fields_are_named(frontend: Any, fields: dict[str, Any], param: str) -> None:
    await check_refused(frontend, "/v1/completions", {"prompt": "hi", **fields}, param)


async def test_the_first_bad_token_id_is_told(frontend: Any) -> None:
    assert "prompt[2]" in check_error(await frontend.complete([1, 2, 999999, -1]), param="prompt")
    refused = await frontend.complete("x", stop_token_ids=[1, 512])
    assert "stop_token_ids[1]" in check_error(refused, param="stop_token_ids")


async def test_missing_prompts_are_named(frontend: Any) -> None:
    check_error(await frontend.http.post("/v1/completions", json={}), param="prompt")
    check_error(await frontend.http.post("/v1/chat/completions", json={}), param="messages")


async def test_harmless_values_and_unknown_fields_are_accepted(frontend: Any) -> None:
    frontend.say("x")
    common = {
        "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "logit_bias": {}, "logprobs": None, "response_format": {"type": "text"}, "user": "me", "echo": False,
        "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "whatever": [1], "stop": None,
        "temperature": None, "max_tokens": None, "seed": None, "stream_options": None, "stream": None,
        "top_k": -1, "min_p": 0, "priority": 3, "model": "tiny",
    }  # fmt: skip
    chat = {
        "top_logprobs": 0,
        "verbosity": "medium",
        "tools": None,
        "tool_choice": "none",
        "parallel_tool_calls": True,
    }
    assert (await frontend.chat(**common, **chat)).status_code == 200
    assert (await frontend.chat(logprobs=False, tools=[], tool_choice="auto")).status_code == 200
    assert (await frontend.complete(**common, suffix="")).status_code == 200
    assert frontend.engine.adds[0].priority == 3


async def test_sampling_reaches_the_engine(frontend: Any) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": -1, "ignore_eos": True,
        "min_tokens": 2, "max_tokens": 3, "stop_token_ids": [5, 6],
    }  # fmt: skip
    await frontend.complete("hello", **fields)
    (add,) = frontend.engine.adds
    params = add.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    assert (params.seed, params.ignore_eos, params.min_tokens, params.max_tokens) == (-1, True, 2, 3)
    assert params.stop_token_ids == (5, 6)
    assert add.tokens.tolist() == frontend.encode("hello")


async def test_what_shapes_the_choice_reaches_the_engine(frontend: Any) -> None:
    fields = {
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "6": 1.5}, "allowed_token_ids": [7, 5, 7], "bad_words": ["fox", " dog"],
        "logprobs": 3, "prompt_logprobs": 2,
    }  # fmt: skip
    await frontend.complete("hello", **fields)
    params = frontend.engine.adds[0].params
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (0.5, -0.5, 1.2)
    assert params.logit_bias == ((5, -100.0), (6, 1.5))
    assert params.allowed_token_ids.ids().tolist() == [5, 7]
    assert (params.logprobs, params.prompt_logprobs) == (3, 2)
    # A word is one at the start of a text and another one within it; a space is part of it if it has one.
    words = [frontend.encode(word) for word in ("fox", " fox", " dog")]
    assert [list(word) for word in params.bad_words] == words


async def test_what_is_around_a_request_reaches_the_engine(frontend: Any) -> None:
    before_ns = time.time_ns()
    await frontend.complete(
        [5] * 40, cache_salt="pepper", max_queue_time=5, priority=-2, user="me", max_tokens=1
    )
    await frontend.complete([5] * 40, max_tokens=1)
    salted, plain = frontend.engine.adds
    assert (salted.cache_salt, salted.priority) == ("pepper", -2)
    assert before_ns + 4_000_000_000 < salted.deadline_ns < time.time_ns() + 5_000_000_000
    hasher = BlockHasher(bytes(32), 16)
    tokens = np.array([5] * 40, dtype=np.int32)
    assert list(salted.block_hashes) == list(hasher.chain(tokens, hasher.root(b"pepper")))
    assert list(plain.block_hashes) == list(hasher.chain(tokens))
    assert (plain.cache_salt, plain.deadline_ns) == ("", 0)


async def test_the_servers_queue_time_is_the_longest(run_harness: Any) -> None:
    async with run_harness(api=ApiConfig(max_queue_time=2.0)) as frontend:
        for asked in (None, 1.0, 50.0, 1e300):
            await frontend.complete(max_tokens=1, max_queue_time=asked)
        now_ns = time.time_ns()
        waits = [round((add.deadline_ns - now_ns) / 1e9) for add in frontend.engine.adds]
    assert waits == [2, 1, 2, 2]


async def test_a_caller_may_name_its_request(frontend: Any) -> None:
    answer = await frontend.complete(request_id="mine:7", max_tokens=1)
    assert answer.json()["id"] == "cmpl-mine:7"
    assert (await frontend.chat(request_id="mine:7", max_tokens=1)).json()["id"] == "chatcmpl-mine:7"


async def test_prompts_are_cut_on_request(run_harness: Any) -> None:
    async with run_harness(max_model_len=64, kv_capacity_tokens=128) as frontend:
        ids = list(range(100, 200))
        cases: list[tuple[dict[str, Any], list[int]]] = [
            ({"truncate_prompt_tokens": 10}, ids[-10:]),
            ({"truncate_prompt_tokens": 10, "truncation_side": "left"}, ids[-10:]),
            ({"truncate_prompt_tokens": 10, "truncation_side": "right"}, ids[:10]),
            ({"truncate_prompt_tokens": -1}, ids[-48:]),
            ({"truncate_prompt_tokens": -1, "max_tokens": 4}, ids[-60:]),
            ({"truncate_prompt_tokens": -1, "max_tokens": 500}, ids[-1:]),
        ]
        for fields, kept in cases:
            assert (await frontend.complete(ids, **fields)).status_code == 200
            assert frontend.engine.adds[-1].tokens.tolist() == kept
        check_error(await frontend.complete(ids, truncate_prompt_tokens=64), code="context_length_exceeded")
        long = "one two three " * 500
        await frontend.complete(long, truncate_prompt_tokens=20)
        assert frontend.engine.adds[-1].tokens.tolist() == frontend.encode(long)[-20:]
        await frontend.chat(long, truncate_prompt_tokens=-1, max_tokens=1)
        assert len(frontend.engine.adds[-1].tokens) == 63


async def test_bos_on_request(run_harness: Any, tokenizer: Any) -> None:
    with_bos = Tokenizer.from_str(tokenizer.to_str())
    with_bos.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    async with run_harness(with_tokenizer=with_bos, template="{{ messages[0].content }}") as frontend:
        cases: list[tuple[Any, str, dict[str, Any], int]] = [
            (frontend.complete, "hi", {}, 1),
            (frontend.complete, "hi", {"add_special_tokens": False}, 0),
            (frontend.complete, "<|im_start|>hi", {}, 1),
            (frontend.complete, "<|im_start|><|im_start|>hi", {}, 1),
            (frontend.complete, "<|im_start|>hi", {"add_special_tokens": False}, 1),
            (frontend.chat, "hi", {}, 0),
            (frontend.chat, "hi", {"add_special_tokens": True}, 1),
            (frontend.chat, "<|im_start|>hi", {}, 1),
            (frontend.chat, "<|im_start|>hi", {"add_special_tokens": True}, 1),
        ]
        for ask, text, fields, count in cases:
            await ask(text, max_tokens=1, **fields)
            assert frontend.engine.adds[-1].tokens.tolist().count(1) == count


async def test_defaults_come_from_the_model(run_harness: Any) -> None:
    defaults = SamplingDefaults.of({"temperature": 0.2, "top_p": 0.9, "top_k": 50, "do_sample": True})
    async with run_harness(defaults=defaults) as frontend:
        await frontend.complete()
        await frontend.complete(temperature=0, top_k=0, top_p=1)
        first, second = (add.params for add in frontend.engine.adds)
    assert (first.temperature, first.top_p, first.top_k) == (0.2, 0.9, 50)
    assert (second.temperature, second.top_p, second.top_k) == (0.0, 1.0, 0)


async def test_requests_without_a_seed_get_different_ones(frontend: Any) -> None:
    for _ in range(3):
        await frontend.complete()
    assert len({add.params.seed for add in frontend.engine.adds}) == 3


async def test_prompt_blocks_are_hashed(frontend: Any) -> None:
    prompt = [5] * 40
    await frontend.complete(prompt, max_tokens=1)
    (add,) = frontend.engine.adds
    assert add.tokens.tolist() == prompt
    expected = BlockHasher(bytes(32), 16).chain(np.array(prompt, dtype=np.int32))
    assert list(add.block_hashes) == list(expected)
    assert len(expected) == 2


async def test_without_prefix_caching_nothing_is_hashed(run_harness: Any) -> None:
    async with run_harness(enable_prefix_caching=False) as frontend:
        await frontend.complete([5] * 40, max_tokens=1)
        assert not frontend.engine.adds[0].block_hashes


async def test_a_list_of_one_prompt_is_that_prompt(frontend: Any) -> None:
    for prompt in ("hello", ["hello"], frontend.encode("hello"), [frontend.encode("hello")]):
        assert (await frontend.complete(prompt, max_tokens=1)).status_code == 200
    assert len({tuple(add.tokens.tolist()) for add in frontend.engine.adds}) == 1


# Limits


LIMIT = 64


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "granted"),
    [
        (LIMIT - 2, None, 2),
        (LIMIT - 1, None, 1),
        (LIMIT - 2, 1, 1),
        (LIMIT - 2, 2, 2),
        (LIMIT - 2, LIMIT, 2),
        (LIMIT - 1, 1, 1),
        (LIMIT - 1, LIMIT, 1),
        (LIMIT, None, None),
        (LIMIT, 1, None),
        (LIMIT + 1, 2, None),
    ],
)
async def test_the_context_limit_to_the_token(
    run_harness: Any, num_prompt: int, max_tokens: int | None, granted: int | None
) -> None:
    async with run_harness(max_model_len=LIMIT) as frontend:
        response = await frontend.complete([5] * num_prompt, max_tokens=max_tokens, ignore_eos=True)
        if granted is None:
            message = check_error(response, param="prompt", code="context_length_exceeded")
            assert f"{num_prompt} tokens" in message
            assert f"{LIMIT} tokens" in message
            assert f"at most {LIMIT - 1}" in message
            assert not frontend.engine.adds
        else:
            assert response.json()["usage"]["completion_tokens"] == granted
            assert frontend.engine.adds[0].params.max_tokens == granted


async def test_a_chat_may_use_the_rest_of_the_context_and_a_completion_sixteen(frontend: Any) -> None:
    await frontend.chat()
    await frontend.complete()
    chat, completion = frontend.engine.adds
    assert chat.params.max_tokens == 512 - len(chat.tokens)
    assert completion.params.max_tokens == 16


async def test_the_newer_limit_wins(frontend: Any) -> None:
    await frontend.chat(max_tokens=7, max_completion_tokens=3)
    assert frontend.engine.adds[0].params.max_tokens == 3


async def test_what_the_kv_cache_cannot_hold_is_refused_or_cut(run_harness: Any) -> None:
    async with run_harness(kv_capacity_tokens=48) as frontend:
        # 40 prompt tokens and 9 more need 48 places: the last token is never fed back.
        assert (await frontend.complete([5] * 40, max_tokens=9)).status_code == 200
        message = check_error(await frontend.complete([5] * 40, max_tokens=10), param="max_tokens")
        assert "49 tokens" in message
        assert "at most 9" in message
        refused = await frontend.chat(max_completion_tokens=100)
        check_error(refused, param="max_completion_tokens")
        await frontend.complete([5] * 40)
        assert frontend.engine.adds[-1].params.max_tokens == 9
        await frontend.chat("x")
        chat = frontend.engine.adds[-1]
        assert len(chat.tokens) + chat.params.max_tokens - 1 == 48
        check_error(await frontend.complete([5] * 49), param="prompt", code="context_length_exceeded")


async def test_min_tokens_is_cut_with_max_tokens_but_not_above_it(run_harness: Any) -> None:
    async with run_harness(max_model_len=LIMIT) as frontend:
        await frontend.complete([5] * 60, max_tokens=50, min_tokens=40)
        assert frontend.engine.adds[0].params.min_tokens == 4
        check_error(await frontend.complete([5], max_tokens=3, min_tokens=4), param="min_tokens")


async def test_a_prompt_too_long_by_its_characters_is_not_tokenised(frontend: Any) -> None:
    huge = "a" * 900_000
    for response in (
        await frontend.complete(huge),
        await frontend.complete(huge, stream=True),
        await frontend.chat(huge, stream=True),
        await frontend.chat([{"type": "text", "text": huge}]),
    ):
        message = check_error(response, code="context_length_exceeded")
        assert "characters" in message


async def test_a_stream_that_can_be_refused_at_once_is(frontend: Any) -> None:
    body = {"stream": True, "max_tokens": 10}
    streamed = await frontend.chat("x " * 2000, **body)
    whole = await frontend.chat("x " * 2000, max_tokens=10)
    check_error(streamed, param="messages", code="context_length_exceeded")
    assert streamed.json() == whole.json()


@pytest.mark.parametrize("text", ["a", "\u0301", " ", "😊", "\x00", "ab "])
async def test_long_prompts_of_one_kind_are_bounded(run_harness: Any, text: str) -> None:
    async with run_harness(max_model_len=8192, max_body_bytes=64 << 20) as frontend:
        for count in (1_000, 60_000, 1_000_000):
            response = await frontend.complete(text * count, max_tokens=1)
            assert response.status_code in (200, 400, 413), response.text


# Messages


async def test_content_as_text_parts_null_or_absent(frontend: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    conversations = [
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": "a\nb"}],
        [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}],
        [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}],
        [*USER, {"role": "assistant", "content": []}],
        [*USER, {"role": "assistant", "content": ""}],
        [*USER, {"role": "tool", "content": [{"type": "text", "text": "ok"}], "tool_call_id": "c1"}],
        [{"role": "developer", "content": "x"}, {"role": "foo", "content": "y", "name": "z"}],
    ]
    for messages in conversations:
        response = await frontend.http.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 1}
        )
        assert response.status_code == 200, response.text
    parts, plain, *_ = (add.tokens.tolist() for add in frontend.engine.adds)
    assert parts == plain


@pytest.mark.parametrize(
    ("arguments", "shown"), [("", "{}"), ('{"a": 1}', '{"a": 1}'), ("not json", '"not json"')]
)
async def test_a_template_sees_a_calls_arguments_as_an_object(
    run_harness: Any, arguments: str, shown: str
) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    async with run_harness(template=template) as frontend:
        messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
        body = {"messages": messages, "max_tokens": 1}
        assert (await frontend.http.post("/v1/chat/completions", json=body)).status_code == 200
        assert frontend.decode(frontend.engine.adds[0].tokens.tolist()) == shown


@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_that_raises_is_a_400_with_its_message(run_harness: Any, stream: bool) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    async with run_harness(template=template) as frontend:
        body = {"messages": [{"role": "system", "content": "x"}, *USER], "stream": stream}
        response = await frontend.http.post("/v1/chat/completions", json=body)
        assert "System role not supported" in check_error(response, param="messages")
        assert (await frontend.chat(max_tokens=1)).status_code == 200


async def test_template_arguments(run_harness: Any) -> None:
    async with run_harness(template="{{ mood }}{{ add_generation_prompt }}") as frontend:
        await frontend.chat(chat_template_kwargs={"mood": "calm"}, max_tokens=1)
        await frontend.chat(add_generation_prompt=False, max_tokens=1)
        prompts = [frontend.decode(add.tokens.tolist()) for add in frontend.engine.adds]
    assert prompts == ["calmTrue", "False"]


async def test_an_empty_chat_prompt(run_harness: Any) -> None:
    async with run_harness(template="") as frontend:
        check_error(await frontend.chat(), param="messages")


# Bodies


async def post_bytes(frontend: Any, content: bytes, **headers: str) -> Any:
    given = {"content-type": "application/json", **headers}
    return await frontend.http.post("/v1/chat/completions", content=content, headers=given)


NESTED = [
    b'{"messages":[{"role":"user","content":"hi"}],"x":' + b"[" * 10000 + b"]" * 10000 + b"}",
    b'{"messages":[{"role":"user","content":"hi"}],"x":' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"messages":[{"role":"user","content":"hi"}],"metadata":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    b'{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":'
    + b'{"a":' * 200
    + b"1"
    + b"}" * 201,
    b'{"messages":[{"role":"user","content":"hi","x":' + b"[" * 150 + b"]" * 150 + b"}]}",
    b"[" * 100000,
]


@pytest.mark.parametrize(
    "content",
    [
        *NESTED,
        b"",
        b"{:",
        b"[]",
        b'"text"',
        b"null",
        b'{"messages":[{"role":"user","content":"\xff\xfe\xc4\xe3"}]}',
        '{"messages":[{"role":"user","content":"你好"}]}'.encode("gbk"),
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"\\udc00 x"}]}',
        b'{"messages":[{"role":"user","content":"hi"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"hi"}],"presence_penalty":NaN}',
        b'{"messages":[{"role":"user","content":"hi"}],"temperature":1e999}',
        b'{"messages":[{"role":"user","content":"hi"}]',
        b"\x00",
    ],
)
async def test_bad_bodies(frontend: Any, content: bytes) -> None:
    check_error(await post_bytes(frontend, content))
    assert (await frontend.http.get("/health")).status_code == 200


async def test_a_deep_but_allowed_body(frontend: Any) -> None:
    content = (
        b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"x":' + b"[" * 90 + b"]" * 90 + b"}"
    )
    assert (await post_bytes(frontend, content)).status_code == 200


async def test_other_content_types(frontend: Any) -> None:
    body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}'
    for refused in ("text/plain", "multipart/form-data; boundary=x", "application/jsonp"):
        check_error(
            await frontend.http.post("/v1/completions", content=body, headers={"content-type": refused})
        )
    assert (
        await post_bytes(frontend, body, **{"content-type": "Application/JSON; charset=utf-8"})
    ).is_success
    assert (await frontend.http.post("/v1/chat/completions", content=body)).is_success
    # What `curl -d` says of everything.
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await post_bytes(frontend, body, **form)).is_success


async def test_a_body_over_the_limit(run_harness: Any) -> None:
    async with run_harness(max_body_bytes=2048) as frontend:
        check_error(await frontend.complete("x" * 5000), 413, code="body_too_large")

        async def endless() -> Any:
            while True:
                yield b" " * 1024

        response = await frontend.http.post(
            "/v1/completions", content=endless(), headers={"content-type": "application/json"}
        )
        check_error(response, 413)
        assert response.headers["connection"] == "close"


async def test_a_body_longer_than_any_prompt_that_fits_is_not_read(run_harness: Any) -> None:
    async with run_harness(max_model_len=64, max_body_bytes=1 << 30) as frontend:
        for response in (
            await frontend.complete("x" * 3_000_000),
            await frontend.complete([1] * 1_500_000),
            await frontend.chat("x" * 3_000_000, stream=True),
        ):
            check_error(response, 413, code="body_too_large")
            assert "maximum context length of 64 tokens" in response.json()["error"]["message"]
            assert response.headers["connection"] == "close"


async def test_another_model_is_not_found(frontend: Any) -> None:
    check_error(await frontend.chat(model="gpt-x"), 404, param="model", code="model_not_found")
    assert (await frontend.chat(model="", max_tokens=1)).is_success
    assert (await frontend.chat(model=None, max_tokens=1)).is_success


async def test_usage_options_belong_to_streams(frontend: Any) -> None:
    check_error(await frontend.chat(stream_options={"include_usage": True}), param="stream_options")
    response = await frontend.chat(stream=True, stream_options={"resumable": "yes"})
    check_error(response, param="stream_options.resumable")
    check_error(await frontend.chat(stream="true"), param="stream")


async def test_bad_generation_config_is_the_operators_error() -> None:
    from streamserve.errors import ConfigError

    for bad in ({"temperature": -1}, {"top_p": "x"}, {"top_k": -3}):
        with pytest.raises(ConfigError, match="generation_config"):
            SamplingDefaults.of(bad)
