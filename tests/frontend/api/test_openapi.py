"""/openapi.json says what the server does: every route is in it, and answers are as it says."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.routing import Route

from streamserve.frontend.api import openapi, replies
from streamserve.frontend.api.docs import page
from streamserve.frontend.api.openapi import OPERATIONS, document
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.keys import KeyRing
from streamserve.frontend.paths import HANDLERS, MONITORING, PROBES

# The document itself, and what browsers read.
DESCRIBED_BY_ITSELF = {(path, "GET") for path in ("/openapi.json", "/docs", "/", "/dashboard", "/web/{path}")}


def routes_of(app: Any) -> list[Any]:
    """The routes behind all middleware."""
    while not hasattr(app, "routes"):
        app = app._app if hasattr(app, "_app") else app.app
    return list(app.routes)


def refs(node: Any) -> set[str]:
    if isinstance(node, dict):
        found = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return found.union(*map(refs, node.values()))
    return set().union(*map(refs, node)) if isinstance(node, list) else set()


def check(model: type[BaseModel], body: bytes | str) -> Any:
    """The body, once the model has taken it."""
    model.model_validate_json(body)
    return json.loads(body)


async def test_every_route_is_described_and_nothing_else(frontend: Any) -> None:
    served = {
        (re.sub(r":\w+", "", route.path), method)
        for route in routes_of(frontend.app)
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
    }
    described = {(operation.path, operation.method.upper()) for operation in OPERATIONS}
    assert served - DESCRIBED_BY_ITSELF == described
    assert len(described) == len(OPERATIONS)


async def test_every_route_is_a_handler_in_metrics(frontend: Any) -> None:
    for route in routes_of(frontend.app):
        assert route.path in HANDLERS or route.path in PROBES | MONITORING


async def test_the_document_is_whole(frontend: Any) -> None:
    response = await frontend.http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    described = response.json()
    assert described == document()
    names = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert refs(described) <= names
    assert not [name for name in names if "streamserve" in name]
    ids = [each["operationId"] for path in described["paths"].values() for each in path.values()]
    assert len(set(ids)) == len(ids)


async def test_what_needs_no_key_says_so(run_harness: Any) -> None:
    async with run_harness(deployment=Deployment(keys=KeyRing(["sk"]))) as frontend:
        for operation in OPERATIONS:
            path = operation.path.replace("{id}", "x").replace("{model}", "x")
            response = await frontend.http.request(operation.method.upper(), path)
            assert (response.status_code == 401) == (not operation.is_open), operation.path
            if not operation.is_open:
                assert 401 in operation.errors


def test_a_prefix_of_a_proxy_is_the_server() -> None:
    assert document("/llm")["servers"] == [{"url": "/llm"}]


CHAT = {"messages": [{"role": "user", "content": "hello"}]}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", CHAT, replies.ChatCompletion),
        ("/v1/chat/completions", {**CHAT, "n": 2, "return_token_ids": True}, replies.ChatCompletion),
        ("/v1/completions", {"prompt": ["hello", "one"], "n": 2}, replies.Completion),
        ("/v1/completions", {"prompt": "hello", "return_token_ids": True, "stop": "q"}, replies.Completion),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3}, replies.Response),
        ("/tokenize", {"prompt": "hello", "return_token_strs": True}, replies.Tokens),
        ("/tokenize", CHAT, replies.Tokens),
        ("/detokenize", {"tokens": [40, 41]}, replies.Prompt),
        ("/v1/chat/completions", {"messages": "hello"}, replies.ErrorReply),
        ("/v1/completions", {}, replies.ErrorReply),
        ("/tokenize", {"prompt": 5}, replies.ErrorReply),
        ("/nowhere", {}, replies.ErrorReply),
    ],
)
async def test_answers_in_one_piece_are_as_described(
    frontend: Any, path: str, body: dict[str, Any], model: type[BaseModel]
) -> None:
    limits = {} if "input" in body or "token" in path else {"max_tokens": 4}
    response = await frontend.http.post(path, json={**limits, **body})
    assert (response.status_code >= 400) == (model is replies.ErrorReply), response.text
    check(model, response.text)


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", {**CHAT, "max_tokens": 4}, replies.ChatCompletionChunk),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 4, "n": 2}, replies.Completion),
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True},
    ],
)
async def test_events_are_as_described(
    frontend: Any, events: Any, path: str, body: dict[str, Any], model: type[BaseModel], more: dict[str, Any]
) -> None:
    response = await frontend.http.post(path, json={**body, **more, "stream": True})
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert chunks
    for chunk in chunks:
        check(model, json.dumps(chunk))


async def test_events_of_responses_are_as_described(frontend: Any) -> None:
    body = {"input": "hello", "max_output_tokens": 3, "stream": True}
    text = (await frontend.http.post("/v1/responses", json=body)).text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert len(data) > 4
    for event in data:
        check(replies.ResponseEvent, event)


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1/models", replies.ModelList),
        ("/v1/models/tiny", replies.ModelCard),
        ("/v1/models/other", replies.ErrorReply),
        ("/v1/streams", replies.StreamList),
        ("/v1/streams/none", replies.ErrorReply),
        ("/live", replies.Status),
        ("/ready", replies.Status),
        ("/health", replies.Status),
        ("/health?deep=1", replies.Status),
        ("/ping", replies.Status),
        ("/load", replies.Load),
        ("/version", replies.Version),
    ],
)
async def test_what_operators_get_is_as_described(frontend: Any, path: str, model: type[BaseModel]) -> None:
    check(model, (await frontend.http.get(path)).text)


async def test_probes_that_fail_are_as_described(run_harness: Any) -> None:
    async with run_harness(says_hello=False) as frontend:
        for path in ("/ready", "/health", "/ping"):
            response = await frontend.http.get(path)
            assert response.status_code == 503
            check(replies.Status, response.text)


async def test_a_live_stream_is_as_described(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(frontend.complete(max_tokens=1))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        (stream,) = check(replies.StreamList, (await frontend.http.get("/v1/streams")).text)["data"]
        check(replies.Stream, (await frontend.http.get(f"/v1/streams/{stream['id']}")).text)
        check(replies.Stream, (await frontend.http.delete(f"/v1/streams/{stream['id']}")).text)
    assert check(replies.Completion, asked.result().text)["choices"][0]["finish_reason"] == "abort"


class Links(HTMLParser):
    """Where a page leads, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.ids: list[str] = []
        self.loads: list[tuple[str, str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        found = dict(attributes)
        if tag == "a":
            self.targets.add(found["href"])
        elif "src" in found or "href" in found or tag == "script":
            self.loads.append((tag, str(found)))
        if "id" in found:
            self.ids.append(found["id"])
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


async def test_the_page_has_all_of_it_and_loads_nothing(frontend: Any) -> None:
    response = await frontend.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    links = Links()
    links.feed(response.text)
    assert links.open == []
    assert links.loads == []
    assert len(set(links.ids)) == len(links.ids)
    assert links.targets <= {f"#{name}" for name in links.ids} | {"openapi.json"}
    for operation in OPERATIONS:
        assert f">{operation.path}<" in response.text


def test_text_from_outside_is_no_markup() -> None:
    described = document()
    described["info"]["title"] = "<script>alert(1)</script>"
    assert "<script>" not in page(described)


def test_statuses_have_a_meaning_each() -> None:
    for operation in OPERATIONS:
        assert set(operation.errors) <= set(openapi._MEANINGS)
