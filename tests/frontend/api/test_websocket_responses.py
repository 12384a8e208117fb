"""WebSocket /v1/responses, with the openai package and by hand; and /v1/ws before the whole frontend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses.responses_server_event import ResponseWsError
from websockets.asyncio.client import ClientConnection, connect

from streamserve.messages import Finish

WAIT_S = 60.0


@pytest.fixture
async def served(run_harness: Any) -> AsyncIterator[tuple[Any, str]]:
    async with run_harness() as frontend, frontend.served() as url:
        yield frontend, url


@pytest.fixture
async def socket(served: tuple[Any, str]) -> AsyncIterator[tuple[Any, ClientConnection]]:
    frontend, url = served
    async with connect(url.replace("http", "ws") + "/v1/responses", compression=None) as client:
        yield frontend, client


async def ask(client: ClientConnection, **body: Any) -> None:
    await client.send(json.dumps({"type": "response.create", **body}))


async def hear(client: ClientConnection) -> Any:
    async with asyncio.timeout(WAIT_S):
        return json.loads(await client.recv())


async def events(client: ClientConnection) -> list[Any]:
    """All events up to the end of a response, or an error for which there is none."""
    heard = []
    while True:
        heard.append(await hear(client))
        last = heard[-1]["type"]
        if last in ("response.completed", "response.incomplete", "response.failed"):
            return heard
        if last == "error" and len(heard) == 1:
            return heard


class TestOpenAIClient:
    async def test_one_response_after_the_other(self, served: tuple[Any, str]) -> None:
        frontend, url = served
        frontend.say("hello 😊 world")
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api,
            api.responses.connect() as connection,
        ):
            for _ in range(3):
                await connection.response.create(model="tiny", input="hi", store=False)
                texts = []
                async for event in connection:
                    if event.type == "response.output_text.delta":
                        texts.append(event.delta)
                    if event.type == "response.completed":
                        assert event.response.output_text == "hello 😊 world"
                        break
                assert "".join(texts) == "hello 😊 world"

    async def test_an_error_is_an_event(self, served: tuple[Any, str]) -> None:
        _, url = served
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api,
            api.responses.connect() as connection,
        ):
            await connection.response.create(model="tiny", input="hi", previous_response_id="resp_1")
            event = await connection.recv()
            assert event.type == "error"
            assert (event.status, event.error.code) == (400, "previous_response_not_found")

    async def test_a_failure_midway_is_an_error_and_a_failed_response(self, served: tuple[Any, str]) -> None:
        frontend, url = served
        frontend.engine.is_automatic = False
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api,
            api.responses.connect() as connection,
        ):
            await connection.response.create(model="tiny", input="hi", store=False)
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            frontend.engine.step()
            heard = [await connection.recv()]
            frontend.engine.finish(frontend.engine.adds[0].stream, Finish.ERROR)
            while heard[-1].type != "response.failed":
                heard.append(await connection.recv())
            error = heard[-2]
            assert isinstance(error, ResponseWsError)
            assert error.error.code == "request_failed"
            assert [event.sequence_number for event in heard] == list(range(len(heard)))
            # That was all: what comes next is of the next request.
            frontend.engine.is_automatic = True
            await connection.response.create(model="tiny", input="hi", max_output_tokens=2)
            assert (await connection.recv()).type == "response.created"


class TestMessages:
    async def test_events_are_those_of_http(self, socket: tuple[Any, ClientConnection]) -> None:
        frontend, client = socket
        frontend.say("one two three")
        # All at once: how deltas are cut is a matter of time.
        frontend.engine.tokens_per_step = 100
        body = {"input": "hi", "temperature": 0, "request_id": "same"}
        await ask(client, **body)
        heard = await events(client)
        answer = await frontend.http.post("/v1/responses", json={**body, "stream": True})
        sent = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        for event in [*heard, *sent]:
            for member in ("created_at", "completed_at"):
                event.get("response", {}).pop(member, None)
        assert heard == sent

    async def test_requests_are_answered_in_their_order(self, socket: tuple[Any, ClientConnection]) -> None:
        frontend, client = socket
        frontend.engine.is_automatic = False
        for number in range(3):
            await ask(client, input=f"{number}", max_output_tokens=2, metadata={"number": str(number)})
        for number in range(3):
            await frontend.engine.until(lambda count=number + 1: len(frontend.engine.adds) == count)
            assert len(frontend.engine.live) == 1, "one at a time"
            while frontend.engine.step():
                pass
            last = (await events(client))[-1]
            assert last["response"]["metadata"] == {"number": str(number)}

    @pytest.mark.parametrize(
        ("message", "param"),
        [
            ({"type": "response.steer", "input": "x"}, "type"),
            ({"type": "session.update"}, "type"),
            ({}, "type"),
            ({"type": "response.create", "input": "x", "generate": False}, "generate"),
            ({"type": "response.create", "input": "x", "stream_id": "a"}, "stream_id"),
            ({"type": "response.create", "input": "x", "background": True}, "background"),
            ({"type": "response.create", "input": "x", "previous_response_id": "r"}, "previous_response_id"),
            ({"type": "response.create"}, "input"),
            ({"type": "response.create", "input": "x", "model": "gpt"}, "model"),
        ],
    )
    async def test_what_is_not_supported_is_refused_by_name(
        self, socket: tuple[Any, ClientConnection], message: dict[str, Any], param: str
    ) -> None:
        _, client = socket
        await client.send(json.dumps(message))
        event = await hear(client)
        assert (event["type"], event["error"]["param"]) == ("error", param)
        assert event["status"] in (400, 404)
        await ask(client, input="x", max_output_tokens=1)
        assert (await events(client))[-1]["type"] == "response.incomplete"

    async def test_what_is_no_json(self, socket: tuple[Any, ClientConnection]) -> None:
        _, client = socket
        await client.send("{")
        assert (await hear(client))["status"] == 400

    async def test_waiting_requests_are_limited(self, socket: tuple[Any, ClientConnection]) -> None:
        frontend, client = socket
        frontend.engine.is_automatic = False
        for _ in range(18):
            await ask(client, input="x", max_output_tokens=1)
        event = await hear(client)
        assert (event["status"], event["error"]["code"]) == (429, "too_many_requests")

    async def test_overload_says_when_to_come_again(self, run_harness: Any) -> None:
        async with run_harness(max_waiting=1) as frontend, frontend.served() as url:
            frontend.engine.is_automatic = False
            async with asyncio.TaskGroup() as group:
                other = group.create_task(frontend.chat(max_tokens=1))
                await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
                async with connect(url.replace("http", "ws") + "/v1/responses") as client:
                    await ask(client, input="x")
                    event = await hear(client)
                frontend.engine.step()
            assert event["status"] == 429
            assert int(event["error"]["headers"]["retry-after"]) >= 1
            assert other.result().status_code == 200

    async def test_leaving_frees_the_engine(self, socket: tuple[Any, ClientConnection]) -> None:
        frontend, client = socket
        frontend.engine.is_automatic = False
        await ask(client, input="x", max_output_tokens=400)
        await ask(client, input="y", max_output_tokens=400)
        await frontend.engine.until(lambda: len(frontend.engine.live) == 1)
        client.transport.abort()
        await frontend.engine.until(lambda: not frontend.engine.live)
        assert len(frontend.engine.adds) == 1


class TestStreams:
    """/v1/ws with the real endpoints."""

    @pytest.mark.parametrize("endpoint", ["chat.completions", "completions", "responses"])
    async def test_chunks_are_those_of_http(self, served: tuple[Any, str], endpoint: str) -> None:
        frontend, url = served
        frontend.say('one "two" 日本 😊')
        frontend.engine.tokens_per_step = 100
        fields: dict[str, Any] = {
            "chat.completions": {"messages": [{"role": "user", "content": "hi"}]},
            "completions": {"prompt": "hi"},
            "responses": {"input": "hi"},
        }[endpoint]
        body = {**fields, "stream": True, "request_id": "same", "seed": 1}
        if endpoint != "responses":
            body["stream_options"] = {"include_usage": True}
        path = "/v1/" + endpoint.replace(".", "/")
        answer = await frontend.http.post(path, json=body)
        sent = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        chunks = [json.loads(data) for data in sent if data != "[DONE]"]
        async with connect(url.replace("http", "ws") + "/v1/ws") as client:
            create = {"type": "create", "id": 1, "endpoint": endpoint, "body": body}
            await client.send(json.dumps(create))
            heard = []
            while (message := await hear(client))["type"] == "chunk":
                heard.append(message["chunk"])
            assert message == {"id": 1, "type": "done"}
            del create["body"]
            await client.send(
                json.dumps({**create, "body": {**body, "stream": False, "stream_options": None}})
            )
            whole = (await hear(client))["result"]
        for chunk in [*heard, *chunks]:
            chunk.pop("created", None)
            for member in ("created_at", "completed_at"):
                chunk.get("response", {}).pop(member, None)
        assert heard == chunks
        assert 'one \\"two\\"' in json.dumps(whole)

    async def test_cancel_frees_the_engine_and_says_abort(self, served: tuple[Any, str]) -> None:
        frontend, url = served
        frontend.engine.is_automatic = False
        async with connect(url.replace("http", "ws") + "/v1/ws") as client:
            body = {"prompt": "hi", "stream": True, "max_tokens": 400}
            create = {"type": "create", "id": "a", "endpoint": "completions", "body": body}
            await client.send(json.dumps(create))
            await frontend.engine.until(lambda: len(frontend.engine.live) == 1)
            frontend.engine.step()
            assert (await hear(client))["chunk"]["choices"][0]["finish_reason"] is None
            await client.send(json.dumps({"type": "cancel", "id": "a"}))
            last = await hear(client)
            assert last["chunk"]["choices"][0]["finish_reason"] == "abort"
            assert await hear(client) == {"id": "a", "type": "done"}
            await frontend.engine.until(lambda: not frontend.engine.live)

    async def test_closing_frees_all_streams(self, served: tuple[Any, str]) -> None:
        frontend, url = served
        frontend.engine.is_automatic = False
        client = await connect(url.replace("http", "ws") + "/v1/ws")
        for number in range(8):
            body = {"prompt": "hi", "stream": number % 2 == 0, "max_tokens": 400}
            create = {"type": "create", "id": number, "endpoint": "completions", "body": body}
            await client.send(json.dumps(create))
        await frontend.engine.until(lambda: len(frontend.engine.live) == 8)
        frontend.engine.step()
        await client.close()
        await frontend.engine.until(lambda: not frontend.engine.live)

    async def test_draining_finishes_streams_refuses_new_ones_and_closes(
        self, served: tuple[Any, str]
    ) -> None:
        frontend, url = served
        frontend.engine.is_automatic = False
        async with connect(url.replace("http", "ws") + "/v1/ws") as client:
            create = {"type": "create", "id": 1, "endpoint": "completions"}
            body = {"prompt": "hi", "stream": True, "max_tokens": 2}
            await client.send(json.dumps({**create, "body": body}))
            await frontend.engine.until(lambda: len(frontend.engine.live) == 1)
            frontend.server.drain()
            await client.send(json.dumps({**create, "id": 2, "body": body}))
            refusal = await hear(client)
            assert (refusal["id"], refusal["error"]["status"]) == (2, 503)
            frontend.engine.step()
            frontend.engine.step()
            async with asyncio.timeout(WAIT_S):
                heard = [json.loads(message) async for message in client]
            assert heard[-1] == {"id": 1, "type": "done"}
            assert client.close_code == 1001

    async def test_what_is_left_at_the_end_of_the_drain_time_gets_an_error(self, run_harness: Any) -> None:
        async with run_harness() as frontend, frontend.served(drain_timeout_s=0.2) as url:
            frontend.engine.is_automatic = False
            async with connect(url.replace("http", "ws") + "/v1/ws") as client:
                body = {"prompt": "hi", "stream": True, "max_tokens": 400}
                create = {"type": "create", "id": 1, "endpoint": "completions", "body": body}
                await client.send(json.dumps(create))
                await frontend.engine.until(lambda: len(frontend.engine.live) == 1)
                frontend.server.drain()
                last = await hear(client)
                assert (last["id"], last["type"], last["error"]["status"]) == (1, "error", 503)
                await asyncio.wait_for(client.wait_closed(), WAIT_S)
                assert client.close_code == 1001
