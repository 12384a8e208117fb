"""/v1/responses: objects and events are OpenAI's, the text is that of a chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseErrorEvent, ResponseStreamEvent
from openai.types.responses.responses_server_event import ResponseWsError
from pydantic import TypeAdapter

from streamserve.errors import InvalidRequest
from streamserve.frontend.api.response_events import ResponseEvents
from streamserve.frontend.api.schema.common import validate
from streamserve.frontend.api.schema.responses import UNSUPPORTED, ResponsesRequest
from streamserve.messages import Finish

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FRAME = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


async def respond(frontend: Any, input: Any = "hello", **fields: Any) -> Any:
    return await frontend.http.post("/v1/responses", json={"input": input, **fields})


def named_events(text: str) -> list[Any]:
    """The events of an SSE body, each named by its type."""
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def deltas(events: list[Any]) -> list[str]:
    return [event["delta"] for event in events if event["type"] == "response.output_text.delta"]


def prompt_of(frontend: Any) -> str:
    """What the engine was asked last, as text."""
    ids = frontend.engine.adds[-1].tokens.tolist()
    text: str = frontend.service.tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    return text


class TestWhole:
    async def test_every_member_is_one_of_openai(self, frontend: Any) -> None:
        frontend.say("hello 😊 world")
        frontend.engine.cached_tokens = 3
        metadata = {"who": "me"}
        answer = await respond(frontend, instructions="Be short.", temperature=0.5, metadata=metadata)
        assert answer.status_code == 200
        body = answer.json()
        response = Response.model_validate(body)
        assert response.output_text == "hello 😊 world"
        assert response.id.startswith("resp_")
        assert response.status == "completed"
        assert (response.object, response.model, response.error) == ("response", "tiny", None)
        assert (response.instructions, response.temperature, response.metadata) == (
            "Be short.",
            0.5,
            metadata,
        )
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens == 3
        assert response.usage.input_tokens == len(frontend.engine.adds[0].tokens)
        total = response.usage.input_tokens + response.usage.output_tokens
        assert response.usage.total_tokens == total
        assert set(body) - set(Response.model_fields) == {"store"}
        assert body["store"] is False

    async def test_a_limit_makes_it_incomplete(self, frontend: Any) -> None:
        response = Response.model_validate((await respond(frontend, max_output_tokens=3)).json())
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.max_output_tokens == 3
        assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
        assert response.usage is not None
        assert response.usage.output_tokens == 3

    async def test_the_id_is_that_of_the_request(self, frontend: Any) -> None:
        body = {"input": "x", "max_output_tokens": 1}
        answer = await frontend.http.post("/v1/responses", json=body, headers={"X-Request-Id": "mine"})
        assert answer.json()["id"] == "resp_mine"
        assert answer.json()["output"][0]["id"] == "msg_mine"

    async def test_cancelling_leaves_what_there_is(self, frontend: Any) -> None:
        frontend.engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(respond(frontend, request_id="x"))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            frontend.engine.step()
            await frontend.until(lambda: frontend.service.registry.find("resp_x", "")[0].num_tokens == 1)
            (record,) = frontend.service.registry.find("resp_x", "")
            record.cancel()
        response = Response.model_validate(asked.result().json())
        assert response.status == "cancelled"
        assert response.usage is not None
        assert response.usage.output_tokens == 1


class TestInput:
    @pytest.mark.parametrize(
        ("fields", "prompt"),
        [
            ({"input": "hi"}, "<user>hi"),
            ({"input": ""}, "<user>"),
            ({"input": "hi", "instructions": "Be kind."}, "<system>Be kind.<user>hi"),
            ({"input": [{"role": "user", "content": "hi"}]}, "<user>hi"),
            (
                {
                    "input": [
                        {"role": "developer", "content": "Be kind."},
                        {
                            "type": "message",
                            "role": "user",
                            "content": [
                                {"type": "input_text", "text": "one"},
                                {"type": "input_text", "text": "two"},
                            ],
                        },
                        {
                            "type": "message",
                            "id": "msg_1",
                            "status": "completed",
                            "role": "assistant",
                            "content": [
                                {"type": "output_text", "text": "three", "annotations": [], "logprobs": []}
                            ],
                        },
                        {"role": "user", "content": "four"},
                    ],
                    "instructions": "First.",
                },
                "<system>First.<system>Be kind.<user>one\ntwo<assistant>three<user>four",
            ),
        ],
    )
    async def test_it_becomes_a_conversation(
        self, run_harness: Any, fields: dict[str, Any], prompt: str
    ) -> None:
        template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        async with run_harness(template=template) as frontend:
            answer = await frontend.http.post("/v1/responses", json={"max_output_tokens": 1, **fields})
            assert answer.status_code == 200
            assert prompt_of(frontend) == prompt

    async def test_an_answer_can_be_sent_back(self, frontend: Any) -> None:
        frontend.say("fine")
        first = (await respond(frontend, "how are you?")).json()
        history = [{"role": "user", "content": "how are you?"}, *first["output"]]
        again = await respond(frontend, [*history, {"role": "user", "content": "and now?"}])
        assert again.status_code == 200
        assert "assistant\nfine" in prompt_of(frontend)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({}, "input"),
            ({"input": None}, "input"),
            ({"input": 5}, "input"),
            ({"input": []}, "input"),
            ({"input": ["hi"]}, "input[0]"),
            ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0]"),
            ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
            ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
            ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
            ({"input": "x", "max_tokens": 5}, "max_tokens"),
            ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
            ({"input": "x", "max_output_tokens": "5"}, "max_output_tokens"),
            ({"input": "x", "temperature": 3}, "temperature"),
            ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
            ({"input": "x", "top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
            ({"input": "x", "top_logprobs": -1}, "top_logprobs"),
            ({"input": "x", "include": ["everything"]}, "include[0]"),
            ({"input": "x", "metadata": {"a": 1}}, "metadata.a"),
            ({"input": "x", "metadata": {str(n): "x" for n in range(17)}}, "metadata"),
            ({"input": "x", "instructions": ["x"]}, "instructions"),
            ({"input": "x", "background": True}, "background"),
            ({"input": "x", "conversation": "conv_1"}, "conversation"),
            ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
            ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
            ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
            ({"input": "x", "tool_choice": "required"}, "tool_choice"),
            ({"input": "x", "truncation": "auto"}, "truncation"),
            ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort"),
            ({"input": "x", "reasoning": {"summary": "auto"}}, "reasoning.summary"),
            ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format.type"),
            ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
            ({"input": "x", "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ({"input": "x", "n": 2}, "n"),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    async def test_what_cannot_be_served_is_refused_by_name(
        self, frontend: Any, fields: dict[str, Any], param: str, stream: bool
    ) -> None:
        answer = await frontend.http.post("/v1/responses", json={"stream": stream, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert not frontend.engine.adds

    async def test_what_asks_for_nothing_is_accepted(self, frontend: Any) -> None:
        answer = await respond(
            frontend,
            max_output_tokens=1,
            background=False,
            conversation=None,
            include=["reasoning.encrypted_content"],
            max_tool_calls=3,
            metadata={},
            parallel_tool_calls=False,
            previous_response_id=None,
            prompt_cache_key="k",
            prompt_cache_retention="24h",
            reasoning={"effort": None, "summary": None},
            safety_identifier="s",
            service_tier="auto",
            store=True,
            text={"format": {"type": "text"}, "verbosity": "medium"},
            tool_choice="auto",
            tools=[],
            top_logprobs=0,
            truncation="disabled",
            user="u",
        )
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert (body["store"], body["user"], body["safety_identifier"]) == (False, "u", "s")
        assert (body["prompt_cache_key"], body["parallel_tool_calls"]) == ("k", False)
        for options in ({}, {"include_obfuscation": True}, {"include_obfuscation": False}):
            answer = await respond(frontend, stream=True, stream_options=options, max_output_tokens=1)
            assert answer.status_code == 200, answer.text

    async def test_previous_responses_have_a_code_that_clients_know(self, frontend: Any) -> None:
        answer = await respond(frontend, previous_response_id="resp_1")
        assert answer.json()["error"]["code"] == "previous_response_not_found"

    async def test_too_long_is_said_of_the_input(self, frontend: Any) -> None:
        for text in ("x" * 3000, "x " * 100_000):
            answer = await respond(frontend, text)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "input")

    async def test_what_the_template_refuses(self, run_harness: Any) -> None:
        async with run_harness(template="{{ raise_exception('no system') }}") as frontend:
            error = (await respond(frontend)).json()["error"]
            assert error["param"] == "input"
            assert "no system" in error["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PART = st.fixed_dictionaries({}, optional={"type": st.just("input_text") | JSON, "text": st.text() | JSON})
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("message") | JSON,
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | JSON,
        "content": st.text(max_size=12) | st.lists(PART | JSON, max_size=3) | JSON,
    },
)
BODY = st.fixed_dictionaries(
    {"input": st.text(max_size=12) | st.lists(ITEM | JSON, max_size=3) | JSON},
    optional={name: JSON for name in [*ResponsesRequest.model_fields, *UNSUPPORTED] if name != "input"},
)


@given(body=BODY)
def test_no_body_breaks_the_check(body: dict[str, Any]) -> None:
    """A body is a request, or is refused."""
    try:
        request = validate(ResponsesRequest, body, UNSUPPORTED)
        conversation = request.conversation()
    except InvalidRequest:
        return
    assert all(isinstance(message["content"], str) for message in conversation.messages)


class TestEvents:
    async def test_a_stream_event_by_event(self, frontend: Any) -> None:
        text = 'one two "three" \\ 日本 \u2028 \u0085 😊'
        frontend.say(text)
        whole = (await respond(frontend)).json()
        answer = await respond(frontend, stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "\u2028" not in answer.text
        events = named_events(answer.text)
        for event in events:
            STREAM_EVENT.validate_python(event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        types = [event["type"] for event in events]
        num_deltas = len(events) - len(FRAME) - len(END) - 1
        assert num_deltas > 3
        middle = ["response.output_text.delta"] * num_deltas
        assert types == [*FRAME, *middle, *END, "response.completed"]
        assert "".join(deltas(events)) == text
        assert all(deltas(events)), "no delta is empty"
        created, completed = events[0]["response"], events[-1]["response"]
        assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
        assert events[1]["response"] == created
        assert events[2]["item"]["content"] == []
        item = events[-2]["item"]
        assert completed["output"] == [item]
        assert item["content"] == [events[-3]["part"]]
        assert events[-4]["text"] == text
        ids = {event["item_id"] for event in events if "item_id" in event}
        assert ids == {item["id"]}
        same = ("id", "created_at", "completed_at", "output")
        assert {k: v for k, v in completed.items() if k not in same} == {
            k: v for k, v in whole.items() if k not in same
        }
        assert completed["output"][0]["content"] == whole["output"][0]["content"]

    async def test_a_limit_ends_it_as_incomplete(self, frontend: Any) -> None:
        events = named_events((await respond(frontend, stream=True, max_output_tokens=2)).text)
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert events[-2]["item"]["status"] == "incomplete"

    async def test_an_answer_without_text(self, frontend: Any) -> None:
        frontend.say("")
        events = named_events((await respond(frontend, stream=True)).text)
        assert [event["type"] for event in events] == [*FRAME, *END, "response.completed"]
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""

    async def test_stop_strings_never_show(self, frontend: Any) -> None:
        frontend.say("one two three four")
        events = named_events((await respond(frontend, stream=True, stop="three")).text)
        assert "".join(deltas(events)) == "one two "
        assert events[-1]["type"] == "response.completed"

    async def test_nothing_comes_before_the_engine(self, frontend: Any) -> None:
        frontend.engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(respond(frontend, stream=True))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            frontend.engine.finish(frontend.engine.adds[0].stream, Finish.ERROR)
        assert asked.result().status_code == 500
        assert asked.result().json()["error"]["code"] == "request_failed"

    async def test_a_failure_midway_is_an_error_and_a_failed_response(self, frontend: Any) -> None:
        frontend.engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            frontend.say("one two three")
            asked = group.create_task(respond(frontend, stream=True))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            frontend.engine.step()
            await frontend.until(lambda: frontend.service.registry.all(None)[0].num_tokens == 1)
            frontend.engine.finish(frontend.engine.adds[0].stream, Finish.ERROR)
        events = named_events(asked.result().text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        *_, error, failed = events
        read = STREAM_EVENT.validate_python(error)
        assert isinstance(read, ResponseErrorEvent)
        assert (read.code, read.param) == ("request_failed", None)
        assert read.message
        # What OpenAI describes and what it sends are not the same; clients have either.
        told = ResponseWsError.model_validate(error).error
        assert (told.type, told.code, told.message) == ("server_error", read.code, read.message)
        STREAM_EVENT.validate_python(failed)
        assert failed["type"] == "response.failed"
        assert failed["response"]["status"] == "failed"
        assert failed["response"]["error"] == {"code": "server_error", "message": read.message}
        assert failed["response"]["output"][0]["content"][0]["text"]

    async def test_a_fault_of_our_own_midway_ends_it_the_same_way(
        self, frontend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_arguments: Any) -> Any:
            raise ValueError("a secret")

        frontend.say("one two three")
        monkeypatch.setattr(ResponseEvents, "end", fail)
        answer = await respond(frontend, stream=True)
        *_, error, failed = named_events(answer.text)
        assert (error["code"], failed["type"]) == ("internal_error", "response.failed")
        assert "a secret" not in answer.text
        assert "a secret" in caplog.text

    async def test_cancelling_ends_it_with_what_there_is(self, frontend: Any) -> None:
        frontend.engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(respond(frontend, stream=True))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            frontend.engine.step()
            await frontend.until(lambda: frontend.service.registry.all(None)[0].num_tokens == 1)
            frontend.service.registry.all(None)[0].cancel()
        events = named_events(asked.result().text)
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["status"] == "cancelled"
        STREAM_EVENT.validate_python(events[-1])

    async def test_closing_early_frees_the_engine(self, run_harness: Any) -> None:
        async with (
            run_harness() as frontend,
            frontend.served() as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api,
        ):
            stream = await api.responses.create(input="hello", stream=True, max_output_tokens=400)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()
            await frontend.engine.until(lambda: not frontend.engine.live)


@pytest.fixture
async def api(run_harness: Any) -> AsyncIterator[tuple[Any, openai.AsyncOpenAI]]:
    async with (
        run_harness() as frontend,
        frontend.served() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60) as client,
    ):
        yield frontend, client


class TestOpenAIClient:
    async def test_create(self, api: tuple[Any, openai.AsyncOpenAI]) -> None:
        frontend, client = api
        frontend.say("hello 😊 world")
        response = await client.responses.create(model="tiny", input="hi", instructions="x", store=False)
        assert response.output_text == "hello 😊 world"
        assert response.status == "completed"

    async def test_stream(self, api: tuple[Any, openai.AsyncOpenAI]) -> None:
        frontend, client = api
        frontend.say("hello 😊 world")
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == "hello 😊 world"

    async def test_the_stream_helper_puts_the_response_together(
        self, api: tuple[Any, openai.AsyncOpenAI]
    ) -> None:
        frontend, client = api
        frontend.say("hello 😊 world")
        async with client.responses.stream(model="tiny", input="hi") as stream:
            async for _ in stream:
                pass
            response = await stream.get_final_response()
        assert response.output_text == "hello 😊 world"

    async def test_a_failed_stream_raises(self, api: tuple[Any, openai.AsyncOpenAI]) -> None:
        frontend, client = api
        frontend.engine.is_automatic = False
        last = ""

        async def read() -> None:
            nonlocal last
            stream = await client.responses.create(model="tiny", input="hi", stream=True)
            async for event in stream:
                last = event.type

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(_caught(read()))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            frontend.engine.step()
            await frontend.until(lambda: frontend.service.registry.all(None)[0].num_tokens == 1)
            frontend.engine.finish(frontend.engine.adds[0].stream, Finish.ERROR)
        error = reading.result()
        assert isinstance(error, openai.APIError)
        assert error.code == "request_failed"
        assert error.message == "The engine could not finish this request."
        assert last in ("response.content_part.added", "response.output_text.delta")


async def _caught(work: Any) -> Exception | None:
    try:
        await work
    except Exception as error:
        return error
    return None
