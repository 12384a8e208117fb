"""GET and DELETE /v1/streams: one's own live answers, and nobody else's."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from streamserve.config import ServerConfig
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.keys import KeyRing
from streamserve.frontend.metrics import Layout

KEYS = KeyRing(["alice:sk-alice", "bob:sk-bob"], ["root:sk-root"])


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


def named(request_id: str, who: str = "alice") -> dict[str, str]:
    return {**key(who), "X-Request-Id": request_id}


@pytest.fixture
async def frontend(run_harness: Any) -> Any:
    async with run_harness(deployment=Deployment(keys=KEYS)) as frontend:
        frontend.engine.is_automatic = False
        yield frontend


async def ask(frontend: Any, headers: dict[str, str], **fields: Any) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 400,
        "ignore_eos": True,
        **fields,
    }
    return await frontend.http.post("/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_from_queued_to_cancelled(frontend: Any, events: Any, stream: bool) -> None:
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask(frontend, named("one"), stream=stream))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        path = "/v1/streams/chatcmpl-one"
        seen = (await frontend.http.get(path, headers=key("alice"))).json()
        assert seen["status"] == "queued"
        assert seen["completion_tokens"] == 0
        assert seen["prompt_tokens"] == len(frontend.engine.adds[0].tokens)
        for _ in range(3):
            frontend.engine.step()
        await frontend.until(lambda: frontend.service.registry.find("chatcmpl-one", None)[0].num_tokens == 3)
        seen = (await frontend.http.get(path, headers=key("alice"))).json()
        assert (seen["status"], seen["completion_tokens"]) == ("running", 3)
        ended = await frontend.http.delete(path, headers=key("alice"))
        assert (ended.status_code, ended.json()["status"]) == (200, "cancelled")
        await frontend.engine.until(lambda: bool(frontend.engine.aborts))
    if stream:
        choices = [event["choices"][0] for event in events(asked.result().text)[:-1]]
        assert choices[-1]["finish_reason"] == "abort"
        text = "".join(choice["delta"].get("content", "") for choice in choices)
    else:
        (choice,) = asked.result().json()["choices"]
        assert choice["finish_reason"] == "abort"
        text = choice["message"]["content"]
    # What had come by then stands.
    assert text == frontend.decode([int(token) for token in frontend.engine.adds[0].tokens[:3]])
    assert (await frontend.http.get(path, headers=key("alice"))).status_code == 404
    counted = frontend.service.registry.metrics.finished
    assert {reason: counter.value for reason, counter in counted.items() if counter.value} == {"abort": 1}


async def test_a_cancelled_request_that_waits_never_runs(frontend: Any) -> None:
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask(frontend, named("one")))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        await frontend.http.delete("/v1/streams/chatcmpl-one", headers=key("alice"))
    assert asked.result().json()["choices"][0]["finish_reason"] == "abort"
    assert frontend.engine.num_steps == 0
    assert not frontend.engine.live


async def test_nobody_else_sees_or_ends_it_but_an_administrator(frontend: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(frontend, named("one")))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        path = "/v1/streams/chatcmpl-one"
        for method in ("GET", "DELETE"):
            refused = await frontend.http.request(method, path, headers=key("bob"))
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "stream_not_found"
            assert (await frontend.http.request(method, path)).status_code == 401
        assert frontend.engine.aborts == []
        assert (await frontend.http.get("/v1/streams", headers=key("bob"))).json()["data"] == []
        for who in ("alice", "root"):
            listed = (await frontend.http.get("/v1/streams", headers=key(who))).json()
            assert [stream["id"] for stream in listed["data"]] == ["chatcmpl-one"]
        assert (await frontend.http.delete(path, headers=key("root"))).status_code == 200


async def test_the_same_id_for_two_users_is_two_streams(frontend: Any) -> None:
    async with asyncio.TaskGroup() as group:
        of_alice = group.create_task(ask(frontend, named("same", "alice")))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        of_bob = group.create_task(ask(frontend, named("same", "bob"), max_tokens=2))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 2)
        await frontend.http.delete("/v1/streams/chatcmpl-same", headers=key("alice"))
        while frontend.engine.step():
            pass
    assert of_alice.result().json()["choices"][0]["finish_reason"] == "abort"
    assert of_bob.result().json()["choices"][0]["finish_reason"] == "length"


async def test_without_keys_all_is_everybodys(run_harness: Any) -> None:
    async with run_harness() as frontend:
        frontend.engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(frontend, {"X-Request-Id": "one"}))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            assert len((await frontend.http.get("/v1/streams")).json()["data"]) == 1
            assert (await frontend.http.delete("/v1/streams/chatcmpl-one")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/streams/none", "/v1/streams/%F0%9F%98%8A", "/v1/streams/" + "x" * 1000]
)
async def test_an_unknown_id_is_404(frontend: Any, path: str) -> None:
    for method in ("GET", "DELETE"):
        response = await frontend.http.request(method, path, headers=key("alice"))
        assert response.status_code == 404
        assert len(response.text) < 500


async def test_the_frontend_that_is_asked_asks_the_others(
    run_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two frontends whose questions are carried by hand; the way through the engine has tests of its own."""
    server = ServerConfig(api_workers=2)
    rows = memoryview(bytearray(Layout(KEYS.names).segment_bytes(2)))
    async with AsyncExitStack() as stack:
        frontends = [
            await stack.enter_async_context(
                run_harness(deployment=Deployment(server=server, keys=KEYS, rows=rows, index=index))
            )
            for index in range(2)
        ]
        for frontend, other in (frontends, frontends[::-1]):

            async def carry(question: Any, other: Any = other) -> Any:
                return other.pump.on_relay(question)

            monkeypatch.setattr(frontend.client, "relay", carry)
            frontend.engine.is_automatic = False
        here, there = frontends
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(ask(there, named("far")))
            await there.engine.until(lambda: len(there.engine.adds) == 1)
            path = "/v1/streams/chatcmpl-far"
            assert (await here.http.get(path, headers=key("alice"))).json()["status"] == "queued"
            assert (await here.http.get(path, headers=key("bob"))).status_code == 404
            for frontend in frontends:
                listed = (await frontend.http.get("/v1/streams", headers=key("alice"))).json()["data"]
                assert [stream["id"] for stream in listed] == ["chatcmpl-far"]
            assert (await here.http.delete(path, headers=key("bob"))).status_code == 404
            ended = await here.http.delete(path, headers=key("alice"))
            assert ended.json()["status"] == "cancelled"
        assert asked.result().json()["choices"][0]["finish_reason"] == "abort"


async def test_other_methods_are_told_which_there_are(frontend: Any) -> None:
    refused = await frontend.http.put("/v1/streams/x", headers=key("alice"))
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}


async def test_a_question_that_it_does_not_know_has_no_answer(frontend: Any) -> None:
    for question in ({}, {"method": "shutdown"}, {"method": "streams.show"}, {"method": "streams.list"}):
        assert frontend.pump.on_relay(question) is None
