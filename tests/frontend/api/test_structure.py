"""Bodies that would take long to parse are refused before they are, and off the event loop."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.client import connect

from streamserve.errors import InvalidRequest
from streamserve.frontend.api import body, structure
from streamserve.frontend.api.schema import neutral
from streamserve.frontend.api.schema.common import validate
from streamserve.frontend.api.schema.completion import CompletionRequest
from streamserve.frontend.api.schema.responses import ResponsesRequest
from streamserve.frontend.api.structure import MAX_DEPTH, MAX_PARTS, MAX_VALUES, SMALL_BYTES, check_structure

JSON = {"Content-Type": "application/json"}
LARGE = {"max_model_len": 2_000_000, "kv_capacity_tokens": 2_000_000, "max_body_bytes": 32 << 20}


def many(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def members(count: int) -> bytes:
    return b"{" + b",".join([b'"%d":1' % at for at in range(count)]) + b"}"


# Each is over the limit as soon as it is a little larger.
RICH = {
    "lists": many(b"[]", MAX_PARTS),
    "objects": many(b"{}", MAX_PARTS),
    "members": members(MAX_PARTS),
    "texts": many(b'""', MAX_PARTS),
    "lists of lists": many(b"[[[]]]", MAX_PARTS // 3 + 1),
    "numbers": many(b"1", 2_100_000),
    "nulls": many(b"null", 2_100_000),
}


@pytest.mark.parametrize("kind", RICH)
async def test_a_body_of_too_many_pieces_is_refused_over_http(
    run_harness: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    parsed = []
    parse = body.parse_object
    monkeypatch.setattr(body, "parse_object", lambda text: parsed.append(len(text)) or parse(text))
    async with run_harness(**LARGE) as frontend:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
            content = b'{"prompt":"a","x":' + RICH[kind] + b"}"
            response = await frontend.http.post(path, content=content, headers=JSON)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "invalid_request")
            assert "more than" in error["message"]
            assert "several requests" in error["message"]
    assert parsed == []


@pytest.mark.parametrize("kind", RICH)
async def test_a_message_of_too_many_pieces_is_refused_on_a_websocket(run_harness: Any, kind: str) -> None:
    async with run_harness(**LARGE) as frontend, frontend.served() as url:
        for path in ("/v1/ws", "/v1/responses"):
            async with connect(url.replace("http", "ws") + path, max_size=None) as socket:
                await socket.send('{"type":"create","x":' + RICH[kind].decode() + "}")
                error = json.loads(await socket.recv())["error"]
                assert error["code"] == "invalid_request"
                assert "more than" in error["message"]


async def test_a_prompt_of_a_million_token_ids_is_served(run_harness: Any) -> None:
    async with run_harness(**LARGE) as frontend:
        response = await frontend.complete([7] * 1_000_000, max_tokens=1)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens"] == 1_000_000


async def test_what_stands_in_a_text_is_no_structure(run_harness: Any) -> None:
    async with run_harness(**LARGE) as frontend:
        text = '[{,}]"\\\\' * 40_000 + "[" * 300_000 + "," * 1_500_000
        response = await frontend.http.post("/tokenize", json={"prompt": text})
        assert response.status_code == 200, response.text
        assert response.json()["count"] > MAX_DEPTH


@pytest.mark.parametrize(
    ("kind", "unsupported", "content"),
    [
        (
            CompletionRequest,
            neutral.COMPLETION,
            {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1025)))},
        ),
        (ResponsesRequest, {}, {"input": "a", "metadata": dict.fromkeys(map(str, range(17)))}),
        (ResponsesRequest, {}, {"input": "a", "include": [1] * 65}),
    ],
)
def test_too_many_members_are_one_error(kind: Any, unsupported: Any, content: Any) -> None:
    # Not one for each that is wrong as well, which would take seconds.
    with pytest.raises(InvalidRequest, match="There may be at most") as refused:
        validate(kind, content, unsupported)
    assert refused.value.param in content


async def test_rich_arguments_of_a_tool_call_are_refused(run_harness: Any) -> None:
    arguments = many(b"[]", MAX_PARTS + 1).decode()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    async with run_harness(**LARGE) as frontend:
        response = await frontend.http.post("/v1/chat/completions", json={"messages": [message]})
        assert response.status_code == 400
        assert "arguments text of a tool call has more than" in response.json()["error"]["message"]


# The look itself

TEXTS = st.text(st.sampled_from(['"', "\\", "a", ",", "[", "]", "{", "}", "é"]), max_size=8)
DATA = st.recursive(
    st.one_of(st.none(), st.integers(0, 99), TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=40,
)


def counted(data: Any) -> tuple[int, int, int]:
    """Containers and commas, strings and containers, and the depth."""
    if isinstance(data, dict | list):
        inner = [counted(item) for item in (data.values() if isinstance(data, dict) else data)]
        values = 1 + sum(item[0] for item in inner) + max(0, len(inner) - 1)
        parts = 1 + sum(item[1] for item in inner) + (len(data) if isinstance(data, dict) else 0)
        return values, parts, 1 + max((item[2] for item in inner), default=0)
    return 0, int(isinstance(data, str)), 0


def is_refused(text: bytes, values: int, parts: int, depth: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "SMALL_BYTES", -1)
        patch.setattr(structure, "MAX_PARTS", parts)
        patch.setattr(structure, "MAX_DEPTH", depth)
        try:
            check_structure(text, values)
        except InvalidRequest:
            return True
        return False


@given(DATA, st.integers(2, 9))
def test_exactly_what_is_there_is_counted(data: Any, piece: int) -> None:
    text = json.dumps([data], ensure_ascii=False).encode()
    values, parts, depth = counted([data])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "_PIECE_BYTES", piece)
        assert not is_refused(text, values, parts, depth)
        assert is_refused(text, values - 1, parts, depth)
        assert is_refused(text, values, parts - 1, depth)
        assert is_refused(text, values, parts, depth - 1)


@given(st.binary(max_size=40), st.integers(2, 9))
def test_anything_can_be_looked_at(text: bytes, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "_PIECE_BYTES", piece)
        is_refused(text, 2, 2, 2)


def test_short_texts_can_only_be_too_deep() -> None:
    check_structure(many(b"[]", SMALL_BYTES // 3 - 1), MAX_VALUES)
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    check_structure(deep, MAX_VALUES)
    with pytest.raises(InvalidRequest, match="nested more than 100"):
        check_structure(b"[" + deep + b"]", MAX_VALUES)
