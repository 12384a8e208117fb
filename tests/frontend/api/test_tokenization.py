"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest


async def test_a_text_and_back(frontend: Any) -> None:
    text = "hello world 😊 <|im_end|>"
    answer = (await frontend.http.post("/tokenize", json={"prompt": text})).json()
    ids = frontend.encode(text)
    assert answer == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    back = await frontend.http.post("/detokenize", json={"tokens": ids, "model": "tiny"})
    assert back.json() == {"prompt": text}
    assert not frontend.engine.adds


async def test_the_tokens_as_they_stand_in_the_vocabulary(frontend: Any) -> None:
    body = {"prompt": "the fox", "return_token_strs": True}
    answer = (await frontend.http.post("/tokenize", json=body)).json()
    names = frontend.service.tokenizer.tokenizer.id_to_token
    assert answer["token_strs"] == [names(token) for token in answer["tokens"]]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"messages": [{"role": "assistant", "content": "Once"}], "continue_final_message": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    ],
)
async def test_a_conversation_is_what_the_chat_makes_of_it(frontend: Any, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    answer = (await frontend.http.post("/tokenize", json=body)).json()
    await frontend.http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert answer["tokens"] == frontend.engine.adds[0].tokens.tolist()


async def test_nothing_is_nothing(frontend: Any) -> None:
    assert (await frontend.http.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
    assert (await frontend.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "5"}, "tokens"),
        ("/detokenize", {"tokens": [1, 512]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [5] * 513}, "tokens"),
        ("/tokenize", {"prompt": "x" * 50_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 50_000}]}, "messages"),
    ],
)
async def test_bad_fields_are_named(frontend: Any, path: str, body: dict[str, Any], param: str) -> None:
    response = await frontend.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_another_model_is_not_found(frontend: Any) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        response = await frontend.http.post(path, json={**body, "model": "other"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_ids_without_a_token_are_nothing(run_harness: Any) -> None:
    async with run_harness(vocab_size=1000) as frontend:
        ids = [*frontend.encode("a"), 999]
        assert (await frontend.http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "a"}
