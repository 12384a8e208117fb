"""Both clients over a WebSocket to the server's own protocol, with answers that the test steers."""

from __future__ import annotations

import asyncio

import pytest
from scripted_endpoint import END, WAIT_S, socket_server

from streamserve.errors import EngineUnavailable, Overloaded
from streamserve.frontend.api.resume import Resumption
from streamserve.frontend.api.websocket import StreamSocket
from streamserve_client import (
    AsyncClient,
    BadRequest,
    ConnectionFailed,
    Retries,
    ServiceUnavailable,
    StreamInterrupted,
    Timeouts,
)

HEAD = {"id": "1", "created": 1, "model": "tiny"}


def chunk(text, **more):
    return {**HEAD, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None, **more}]}


def make_app(service, endpoint):
    return StreamSocket(service, {"completions": endpoint}, Resumption(service))


@pytest.fixture
async def server():
    async with socket_server(make_app, path="/v1/ws") as running:
        yield running


@pytest.fixture
def client(make_client, server):
    return make_client(url=server.url.replace("ws", "http", 1), transport="websocket")


async def soon(awaitable):
    async with asyncio.timeout(WAIT_S):
        return await awaitable


async def test_streams_and_whole_answers_over_one_connection(client, server):
    async with asyncio.TaskGroup() as group:
        first = group.create_task(client.read("completions", "One", request_id="one"))
        answer_one = await server.endpoint.answer(0)
        whole = group.create_task(client.create("completions", "Two", request_id="two"))
        answer_two = await server.endpoint.answer(1)
        third = group.create_task(client.read("completions", "Three"))
        answer_three = await server.endpoint.answer(2)
        answer_three.give([chunk("c"), chunk("C")])
        answer_two.give({**HEAD, "choices": []})
        answer_one.give(chunk("a"))
        answer_three.give(END)
        answer_one.give(chunk("A", finish_reason="stop"))
        answer_one.give(END)
    assert first.result().text == "aA"
    assert first.result().result["choices"][0]["finish_reason"] == "stop"
    assert whole.result() == {**HEAD, "choices": []}
    assert third.result().text == "cC"
    assert answer_one.call.body == {
        "prompt": "One",
        "request_id": "one",
        "stream": True,
        "stream_options": {"include_usage": True, "resumable": True},
    }
    assert answer_two.call.body == {"prompt": "Two", "request_id": "two"}
    assert len(server.server.server_state.connections) == 1


async def test_leaving_a_stream_cancels_it_and_no_other(client, server):
    async with asyncio.TaskGroup() as group:
        other = group.create_task(client.read("completions", "One"))
        staying = await server.endpoint.answer(0)
        left = group.create_task(client.read("completions", "Two", limit=1))
        leaving = await server.endpoint.answer(1)
        leaving.give(chunk("b"))
        await soon(leaving.is_closed.wait())
        assert not staying.is_closed.is_set()
        staying.give(chunk("a"))
        staying.give(END)
    assert (other.result().text, left.result().text) == ("a", "b")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_cancelling_a_task_cancels_its_request(server, is_stream):
    async with AsyncClient(server.url.replace("ws", "http", 1), transport="websocket") as client:

        async def ask():
            if is_stream:
                async for _ in client.completions.stream("One"):
                    pass
            else:
                await client.completions.create("One")

        task = asyncio.create_task(ask())
        answer = await server.endpoint.answer(0)
        if is_stream:
            answer.give(chunk("a"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await soon(answer.is_closed.wait())


async def test_dropping_a_stream_cancels_it(server):
    async with AsyncClient(server.url.replace("ws", "http", 1), transport="websocket") as client:

        async def first_text():
            async for text in client.completions.stream("One").texts():
                return text
            raise AssertionError("no text")

        task = asyncio.create_task(first_text())
        answer = await server.endpoint.answer(0)
        answer.give(chunk("a"))
        assert await task == "a"
        await soon(answer.is_closed.wait())


async def test_a_busy_server_is_asked_again(client, server):
    server.endpoint.failure = Overloaded("The queue is full.", 7)

    async def free():
        while not client.delays:  # noqa: ASYNC110  (the client tells nobody)
            await asyncio.sleep(0)
        server.endpoint.failure = None
        answer = await server.endpoint.answer(0)
        answer.give(chunk("a"))
        answer.give(END)

    async with asyncio.TaskGroup() as group:
        reading = group.create_task(client.read("completions", "One"))
        group.create_task(free())
    assert reading.result().text == "a"
    assert client.delays[0] == 7.5


async def test_a_refused_request(client, server):
    with pytest.raises(BadRequest) as raised:
        await client.create("completions", "One", extra_body={"bad": 1})
    assert (raised.value.status, raised.value.param) == (400, "bad")
    assert client.delays == []


async def test_a_request_that_is_too_large_to_be_looked_at(client, server):
    """It is answered by an error that does not name it."""
    with pytest.raises(BadRequest) as raised:
        await client.create("completions", "x" * (1 << 19))
    assert raised.value.status == 413
    assert client.delays == []
    assert server.endpoint.answers == []


async def test_a_failure_in_the_middle(client, server):
    reading = asyncio.create_task(client.read("completions", "One"))
    answer = await server.endpoint.answer(0)
    answer.give(chunk("a"))
    answer.give(EngineUnavailable("The engine died."))
    with pytest.raises(ServiceUnavailable) as raised:
        await reading
    assert raised.value.message == "The engine died."
    assert client.delays == []


async def test_a_lost_connection_interrupts_what_has_begun_and_repeats_what_has_not(make_client, server):
    client = make_client(
        url=server.url.replace("ws", "http", 1),
        transport="websocket",
        retries=Retries(resume_s=0, chance=lambda: 1.0),
    )

    async def ask():
        with pytest.raises(StreamInterrupted) as raised:
            await client.read("completions", "One")
        return raised.value

    async with asyncio.TaskGroup() as group:
        begun = group.create_task(ask())
        answer = await server.endpoint.answer(0)
        waiting = group.create_task(client.read("completions", "Two"))
        await server.endpoint.answer(1)
        answer.give([chunk("a"), chunk("A")])
        await asyncio.sleep(0)
        # Behind the chunks.
        cancelled = group.create_task(client.read("completions", "Three", limit=1))
        last = await server.endpoint.answer(2)
        last.give(chunk("c"))
        await cancelled
        for connection in list(server.server.server_state.connections):
            connection.transport.abort()
        again = await server.endpoint.answer(3)
        assert again.call.body["prompt"] == "Two"
        again.give(chunk("b"))
        again.give(END)
    assert begun.result().partial_text == "aA"
    assert begun.result().partial_answer["choices"][0]["text"] == "aA"
    assert waiting.result().text == "b"
    assert client.delays == [0.5]


async def test_nobody_listens(make_client):
    client = make_client(
        url="http://127.0.0.1:9", transport="websocket", retries=Retries(2, chance=lambda: 1.0)
    )
    with pytest.raises(ConnectionFailed):
        await client.create("completions", "One")
    assert client.delays == [0.5, 1.0]


async def test_an_answer_that_does_not_begin_in_time(make_client, server):
    client = make_client(
        url=server.url.replace("ws", "http", 1), transport="websocket", timeouts=Timeouts(answer_s=0.01)
    )
    with pytest.raises(Exception, match="did not begin in time"):
        await client.read("completions", "One")
    await soon((await server.endpoint.answer(0)).is_closed.wait())
    assert client.delays == []


async def test_a_client_that_is_closed_ends_its_streams(client, server):
    async def ask():
        with pytest.raises(StreamInterrupted):
            await client.read("completions", "One")

    async with asyncio.TaskGroup() as group:
        reading = group.create_task(ask())
        answer = await server.endpoint.answer(0)
        answer.give(chunk("a"))
        probe = group.create_task(client.read("completions", "Two", limit=1))
        (await server.endpoint.answer(1)).give(chunk("b"))
        await probe
        await client.close()
        await reading
    await soon(answer.is_closed.wait())
    with pytest.raises(Exception, match="the client is closed"):
        await client.create("completions", "One")


async def test_a_lost_connection_loses_nothing_of_a_kept_stream(client, server):
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(client.read("completions", "One"))
        answer = await server.endpoint.answer(0)
        for text in "abcd":
            answer.give([chunk(text), chunk(text.upper())])
            await pass_one(client, server)
            cut(server)
        answer.give(END)
    assert reading.result().text == "aAbBcCdD"
    assert [one.call.body["prompt"] for one in server.endpoint.answers].count("One") == 1


async def test_a_request_that_has_given_nothing_yet_is_not_made_twice(client, server):
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(client.read("completions", "One"))
        answer = await server.endpoint.answer(0)
        await pass_one(client, server)
        cut(server)
        answer.give(chunk("a"))
        answer.give(END)
    assert reading.result().text == "a"
    assert len(server.endpoint.answers) == 2


async def pass_one(client, server):
    """Another answer comes: whatever the server had sent before has come as well."""
    probe = asyncio.create_task(client.create("completions", "Two"))
    (await server.endpoint.answer(len(server.endpoint.answers))).give({**HEAD, "choices": []})
    await probe


def cut(server):
    """Breaks all connections."""
    for connection in list(server.server.server_state.connections):
        connection.transport.abort()
