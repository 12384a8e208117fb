"""What cannot be done is refused by name on every path, before a stream begins, and nobody else notices."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from server import running_server
from ways_in import (
    ALL_WAYS,
    CHAT,
    COMPLETION,
    HTTP,
    PATHS,
    RESPONSE,
    SOCKET_STREAM,
    SSE,
    TRANSPORTS,
    Refused,
    ask,
    prompt,
)
from websockets.sync.client import connect

VOCAB_SIZE = 512
NAN, INFINITY = float("nan"), float("inf")

# What is wrong, wherever it is said.
ANYWHERE = [
    *(("logit_bias", {key: 3}) for key in ("512", "70512", "-1", "1e3", " 5", "05", "cat", "")),
    *(("logit_bias", {"5": value}) for value in (NAN, INFINITY, None, "1")),
    *(("seed", value) for value in (2**64, 2**63, -(2**63) - 1, 1e20, 1.5, "1", True)),
    *(("top_k", value) for value in (0.01, 1e18, -5, "5")),
    *(("min_p", value) for value in (-1, 2, NAN)),
    *(("repetition_penalty", value) for value in (0, -1, INFINITY)),
    *(("presence_penalty", value) for value in (NAN, 3, "x")),
    *(("frequency_penalty", value) for value in (NAN, -3)),
    *(("temperature", value) for value in (1e308, -1, NAN, "hot")),
    *(("top_p", value) for value in (0, -1, 1.1, NAN)),
    *(("max_tokens", value) for value in ("5", 0, -1, 1.5, 2**70)),
    *(("stop", value) for value in ([""], ["a"] * 5, 5, ["a" * 2000])),
    *(("stop_token_ids", value) for value in ([VOCAB_SIZE], [-1], [2**70], [1.5], ["1"])),
    *(("allowed_token_ids", value) for value in ([], [VOCAB_SIZE], [2**70])),
    *(("bad_words", value) for value in ([""], ["x"] * 129, [5])),
    ("stream", "true"),
    ("priority", 2**40),
]  # fmt: skip
PROMPTS = (
    "", [], [[]], [""], ["a", ""], [1, 2, 999_999], [-1], [2**62], [2**70], [1.5], [True], [1, "a"], {"a": 1}
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
UNSUPPORTED = [
    (CHAT, "tools", [TOOL]),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": "notadict"}}),
    (CHAT, "guided_regex", "[invalid"),
    (CHAT, "structured_outputs", {"choice": ["yes"]}),
    (COMPLETION, "response_format", {"type": "json_object"}),
    (COMPLETION, "guided_json", {"type": "object"}),
    (COMPLETION, "suffix", "the end"),
    (RESPONSE, "tools", [{"type": "function", "name": "f", "parameters": {}}]),
    (RESPONSE, "background", True),
    (RESPONSE, "previous_response_id", "resp_1"),
]  # fmt: skip


def nested(depth, inner=None):
    """A schema of objects in objects."""
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner or {}}}
    return inner


def refusal(server, endpoint, transport, body):
    with pytest.raises(Refused) as refused:
        ask(server.url, endpoint, transport, {"model": "tiny", **body})
    assert not refused.value.is_late
    return refused.value


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
def test_fields_out_of_range(tiny_server, untouched, endpoint, transport):
    for name, value in ANYWHERE:
        is_json = not re.search("NaN|Infinity", json.dumps(value))
        if name == "stream" and transport in (SSE, SOCKET_STREAM):
            # Whoever asks for a stream has said so already.
            continue
        refused = refusal(tiny_server, endpoint, transport, {**prompt(endpoint, "hi"), name: value})
        assert refused.status == 400, (name, value, refused)
        expected = {"max_tokens": "max_output_tokens"}.get(name, name) if endpoint == RESPONSE else name
        told = refused.error["param"]
        if is_json:
            assert told.partition("[")[0].partition(".")[0] == expected, (name, value, refused)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prompts_that_are_none(tiny_server, untouched, transport):
    for given in PROMPTS:
        refused = refusal(tiny_server, COMPLETION, transport, {"prompt": given})
        assert (refused.status, refused.error["param"]) == (400, "prompt"), given
    assert refusal(tiny_server, CHAT, transport, {"messages": []}).error["param"] == "messages"
    assert refusal(tiny_server, RESPONSE, transport, {"input": []}).error["param"] == "input"
    assert refusal(tiny_server, COMPLETION, transport, {"prompt": "x", "max_tokens": 0}).status == 400


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("endpoint", "name", "value"), UNSUPPORTED)
def test_what_would_change_the_answer_and_is_not_there_is_refused_by_name(
    tiny_server, endpoint, name, value, transport
):
    refused = refusal(tiny_server, endpoint, transport, {**prompt(endpoint, "hi"), name: value})
    assert refused.status in (400, 404), refused
    assert refused.error["param"] == name


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
def test_a_prompt_that_is_too_long_is_refused_before_a_stream_begins(tiny_server, endpoint, transport):
    refused = refusal(tiny_server, endpoint, transport, prompt(endpoint, "x " * 100_000))
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "65536" in refused.error["message"]


@pytest.mark.parametrize("unit", ["a", "\u0301", " ", "\U0001f600", "\x00", "1"])
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION, RESPONSE])
def test_a_megabyte_of_the_same_character(tiny_server, untouched, endpoint, unit):
    text = unit * (1_000_000 // len(json.dumps(unit)[1:-1]))
    assert refusal(tiny_server, endpoint, HTTP, prompt(endpoint, text)).status in (400, 413)


@pytest.mark.parametrize("depth", [60, 900, 10_000])
@pytest.mark.parametrize("name", ["x", "tools", "metadata", "chat_template_kwargs", "messages", "logit_bias"])
def test_deeply_nested_bodies(tiny_server, untouched, name, depth):
    inner = '{"type":"object","properties":{"a":' * (depth // 2) + "{}" + "}}" * (depth // 2)
    given = f'[{{"type":"function","function":{{"name":"f","parameters":{inner}}}}}]'
    body = f'{{"messages":[{{"role":"user","content":"hi"}}],"max_tokens":1,"{name}":{given}}}'
    headers = {"content-type": "application/json"}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = httpx.post(tiny_server.url + path, content=body, headers=headers, timeout=300)
        assert answer.status_code in (200, 400), answer.text
        assert "traceback" not in answer.text.lower()
        if depth == 10_000 or (name not in ("x", "metadata") and "chat" in path):
            assert answer.status_code == 400


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
def test_deep_bodies_over_every_path(tiny_server, untouched, endpoint, transport):
    wants_stream = json.dumps(transport in (SSE, SOCKET_STREAM))
    known = json.dumps(prompt(endpoint, "hi"))[1:-1]
    for depth in (110, 900, 10_000):
        deep = f'{{{known},"stream":{wants_stream},"x":{"[" * depth}{"]" * depth}}}'
        if transport in (HTTP, SSE):
            headers = {"content-type": "application/json"}
            answer = httpx.post(tiny_server.url + PATHS[endpoint], content=deep, headers=headers, timeout=300)
            status, error = answer.status_code, answer.json()["error"]
        else:
            with connect(tiny_server.url.replace("http", "ws", 1) + "/v1/ws") as client:
                client.send(f'{{"type":"create","id":1,"endpoint":"{endpoint}","body":{deep}}}')
                error = json.loads(client.recv(300))["error"]
                status = error["status"]
                client.send('{"type":"ping"}')
                assert json.loads(client.recv(300)) == {"type": "pong"}
        assert (status, error["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    "raw",
    [
        b"{:", b"", b"\xff\xfe", '{"prompt":"你"}'.encode("gbk"), '{"prompt":"é"}'.encode("latin-1"),
        '{"prompt":"x"}'.encode("utf-16"), b'{"prompt":"x","prompt":', b'"' * 1000, b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_json(tiny_server, path, raw):
    headers = {"content-type": "application/json"}
    answer = httpx.post(tiny_server.url + path, content=raw, headers=headers, timeout=300)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
def test_half_a_surrogate_pair(tiny_server, endpoint, transport):
    body = {**prompt(endpoint, "x\ud800y"), "max_tokens": 3}
    assert refusal(tiny_server, endpoint, transport, body).status == 400


def test_heads_of_any_size(tiny_server, untouched):
    for headers in ({"X-Long": "a" * 200_000}, {f"X-{number}": "a" for number in range(5000)}):
        answer = httpx.get(f"{tiny_server.url}/health", headers=headers, timeout=300)
        assert answer.status_code == 431
        assert answer.json()["error"]["message"]


TEMPLATE = """{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}{% for message in messages -%}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}
{%- endif %}{{- message['content'] }}{% endfor %}"""
SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}


KV_TOKENS = 256


@pytest.fixture(scope="module")
def stern_server(tiny_model, tmp_path_factory):
    """A server with a template that refuses much, and little KV cache."""
    template = tmp_path_factory.mktemp("templates") / "stern.jinja"
    template.write_text(TEMPLATE)
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        f"--num-gpu-blocks-override={KV_TOKENS // 16}",
        f"--chat-template={template}",
        env={"OMP_NUM_THREADS": "1"},
    ) as server:
        yield server
    assert "Traceback" not in server.output


CONVERSATIONS = [
    ([SYSTEM, USER], "System role not supported"),
    ([USER, USER], "Roles must alternate"),
    ([{"role": "assistant", "content": "x"}], "Roles must alternate"),
]
TOLD = [
    *((endpoint, *told) for told in CONVERSATIONS for endpoint in (CHAT, RESPONSE)),
    # A response knows its roles itself.
    (CHAT, [{"role": "foo", "content": "x"}], "Roles must alternate"),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("endpoint", "messages", "said"), TOLD)
def test_what_a_template_says_against_a_conversation_is_told(
    stern_server, endpoint, messages, said, transport
):
    name = "messages" if endpoint == CHAT else "input"
    refused = refusal(stern_server, endpoint, transport, {name: messages, "max_tokens": 2})
    assert (refused.status, refused.error["param"]) == (400, name)
    assert said in refused.error["message"]
    well = {**prompt(endpoint, "hi"), "max_tokens": 2, "ignore_eos": True}
    assert ask(stern_server.url, endpoint, transport, well).only.reason == "length"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_template_in_a_request_says_is_told(cramped_server, transport):
    body = {"messages": [SYSTEM, USER], "chat_template": TEMPLATE, "max_tokens": 2}
    refused = refusal(cramped_server, CHAT, transport, body)
    assert refused.status == 400
    assert "System role not supported" in refused.error["message"]


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
def test_what_the_kv_cache_can_never_hold_is_refused_at_once(stern_server, endpoint, transport):
    body = {**prompt(endpoint, "hi"), "ignore_eos": True, "temperature": 0}
    refused = refusal(stern_server, endpoint, transport, {**body, "max_tokens": 300})
    limit = "max_output_tokens" if endpoint == RESPONSE else "max_tokens"
    assert (refused.status, refused.error["param"]) == (400, limit)
    (most,) = re.findall(r"may be at most (\d+)", refused.error["message"])
    assert (
        ask(stern_server.url, endpoint, transport, {**body, "max_tokens": int(most)}).only.reason == "length"
    )
    refused = refusal(stern_server, endpoint, transport, {**body, "max_tokens": int(most) + 1})
    assert refused.status == 400
    refused = refusal(
        stern_server, endpoint, transport, {**prompt(endpoint, "x y z " * 200), "max_tokens": 1}
    )
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert str(KV_TOKENS) in refused.error["message"]


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ODD_TURNS = [
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]},
    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "no JSON {"}}]},
    {"role": "assistant", "content": []},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("turn", ODD_TURNS)
@pytest.mark.parametrize("content", ["ok", [{"type": "text", "text": "ok"}]])
def test_turns_without_content_are_turns(tiny_server, turn, content, transport):
    answer = {"role": "tool", "tool_call_id": "c1", "content": content}
    body = {"model": "tiny", "messages": [USER, turn, answer], "max_tokens": 2, "ignore_eos": True}
    assert ask(tiny_server.url, CHAT, transport, body).only.reason == "length"


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
@pytest.mark.parametrize("max_tokens", [None, 1, 2])
def test_the_context_ends_where_it_is_said_to(cramped_server, endpoint, transport, max_tokens):
    limit = 512
    around = 0
    if endpoint != COMPLETION:
        asked = {"messages": [{"role": "user", "content": "a"}]}
        counted = httpx.post(f"{cramped_server.url}/tokenize", json=asked, timeout=300).json()["count"]
        around = counted - 1
    for length in (limit - 2, limit - 1, limit, limit + 1):
        given = {"prompt": [7] * length}
        if endpoint != COMPLETION:
            given = prompt(endpoint, "a" * (length - around))
        body = {"model": "tiny", **given, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        if length >= limit:
            refused = refusal(cramped_server, endpoint, transport, body)
            assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
            assert f"{length} tokens" in refused.error["message"]
            assert "512" in refused.error["message"]
            continue
        if endpoint != RESPONSE:
            body["stream_options"] = {"include_usage": True}
        said = ask(cramped_server.url, endpoint, transport, body)
        assert said.usage["prompt_tokens"] == length
        room = limit - length
        wanted = 16 if endpoint == COMPLETION else room
        assert said.usage["completion_tokens"] == min(max_tokens or wanted, room)
        assert said.only.reason == "length"
