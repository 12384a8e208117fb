"""/v1/ws: the messages, over a real socket, with an endpoint that the test steers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_endpoint import END, WAIT_S, ScriptedEndpoint, SocketServer, socket_server
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from streamserve.errors import EngineUnavailable, Overloaded, RequestFailed
from streamserve.frontend.api.resume import Resumption
from streamserve.frontend.api.websocket import Connection, StreamSocket


def streams(service: Any, endpoint: Any) -> StreamSocket:
    return StreamSocket(
        service, {"chat.completions": endpoint, "completions": endpoint}, Resumption(service), max_streams=8
    )


@pytest.fixture
async def server() -> AsyncIterator[SocketServer]:
    async with socket_server(streams) as running:
        yield running


@pytest.fixture
async def client(server: SocketServer) -> AsyncIterator[ClientConnection]:
    async with connect(server.url, compression=None) as connection:
        yield connection


async def say(client: ClientConnection, **message: Any) -> None:
    await client.send(json.dumps(message))


async def create(client: ClientConnection, stream_id: Any, *, stream: bool = True, **body: Any) -> None:
    body = {"stream": stream, **body}
    await say(client, type="create", id=stream_id, endpoint="completions", body=body)


async def hear(client: ClientConnection) -> Any:
    async with asyncio.timeout(WAIT_S):
        message = await client.recv()
    assert isinstance(message, str), "everything is text"
    return json.loads(message)


async def closed(client: ClientConnection) -> tuple[int, str]:
    """Code and reason with which the server closes, whatever comes before."""
    async with asyncio.timeout(WAIT_S):
        # The library ends an iteration for good reasons to close, and raises for the others.
        with contextlib.suppress(ConnectionClosed):
            async for _ in client:
                pass
    assert client.close_code is not None
    return client.close_code, client.close_reason or ""


class TestStreams:
    async def test_chunks_are_the_objects_of_the_endpoint_and_done_is_last(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        await create(client, "a")
        answer = await server.endpoint.answer(0)
        chunks = [{"text": "naïve \u2028 \U0001f600"}, {"text": '"quoted"\\'}, {"finish_reason": "stop"}]
        answer.give(chunks[:1])
        answer.give(chunks[1:])
        answer.give(END)
        for chunk in chunks:
            assert await hear(client) == {"id": "a", "type": "chunk", "chunk": chunk}
        assert await hear(client) == {"id": "a", "type": "done"}

    async def test_an_answer_in_one_piece_is_a_result(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        await create(client, 7, stream=False)
        (await server.endpoint.answer(0)).give({"choices": [{"text": "hi"}]})
        assert await hear(client) == {"id": 7, "type": "result", "result": {"choices": [{"text": "hi"}]}}
        assert await hear(client) == {"id": 7, "type": "done"}

    async def test_many_streams_run_side_by_side(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        for number in range(8):
            await create(client, number, n=number)
        answers = [await server.endpoint.answer(number) for number in range(8)]
        for turn in range(5):
            for answer in reversed(answers):
                answer.give({"text": f"{answer.call.body['n']}/{turn}"})
        for answer in answers:
            answer.give(END)
        heard: dict[int, list[str]] = {number: [] for number in range(8)}
        done: set[int] = set()
        while len(done) < 8:
            message = await hear(client)
            if message["type"] == "done":
                done.add(message["id"])
            else:
                assert message["id"] not in done, "nothing comes after done"
                heard[message["id"]].append(message["chunk"]["text"])
        assert heard == {number: [f"{number}/{turn}" for turn in range(5)] for number in range(8)}

    async def test_answers_have_ids_of_their_own(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        await create(client, 1)
        await create(client, 2)
        first, second = await server.endpoint.answer(0), await server.endpoint.answer(1)
        assert first.call.request_id != second.call.request_id
        assert first.call.tenant == ""
        assert first.call.num_bytes > 0

    async def test_an_id_is_free_again_after_its_stream(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        for turn in range(3):
            await create(client, "again")
            (await server.endpoint.answer(turn)).give(END)
            assert await hear(client) == {"id": "again", "type": "done"}

    async def test_one_and_the_text_1_are_two_ids(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        await create(client, 1, which="number")
        await create(client, "1", which="text")
        for index in range(2):
            answer = await server.endpoint.answer(index)
            answer.give({"which": answer.call.body["which"]})
        heard = [await hear(client) for _ in range(2)]
        assert sorted((str(type(m["id"])), m["chunk"]["which"]) for m in heard) == [
            ("<class 'int'>", "number"),
            ("<class 'str'>", "text"),
        ]


class TestErrors:
    async def test_a_refused_request_is_an_error_with_a_status(self, client: ClientConnection) -> None:
        await create(client, "x", bad=1)
        error = {"message": "bad is bad.", "type": "invalid_request_error", "param": "bad"}
        error |= {"code": "invalid_request", "status": 400}
        assert await hear(client) == {"id": "x", "type": "error", "error": error}

    async def test_overload_says_when_to_come_again(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        server.endpoint.failure = Overloaded("too many", 7)
        await create(client, "x")
        error = (await hear(client))["error"]
        assert (error["status"], error["code"], error["retry_after"]) == (429, "overloaded", 7)

    async def test_no_engine_is_503(self, server: SocketServer, client: ClientConnection) -> None:
        server.endpoint.failure = EngineUnavailable("The model is loading.")
        await create(client, "x", stream=False)
        error = (await hear(client))["error"]
        assert (error["status"], error["message"]) == (503, "The model is loading.")

    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_failure_is_the_last_message_of_its_stream_alone(
        self, server: SocketServer, client: ClientConnection, stream: bool
    ) -> None:
        await create(client, "bad", stream=stream)
        await create(client, "good")
        bad, good = await server.endpoint.answer(0), await server.endpoint.answer(1)
        if stream:
            bad.give({"text": "so far"})
            assert (await hear(client))["type"] == "chunk"
        bad.give(RequestFailed("The engine could not finish this request."))
        message = await hear(client)
        assert (message["id"], message["type"], message["error"]["status"]) == ("bad", "error", 500)
        good.give({"text": "on"})
        assert await hear(client) == {"id": "good", "type": "chunk", "chunk": {"text": "on"}}

    async def test_of_our_own_faults_only_that_there_was_one(
        self, server: SocketServer, client: ClientConnection, caplog: pytest.LogCaptureFixture
    ) -> None:
        await create(client, "x")
        (await server.endpoint.answer(0)).give(KeyError("secret detail"))
        error = (await hear(client))["error"]
        assert (error["status"], error["code"]) == (500, "internal_error")
        assert "secret" not in error["message"]
        assert "a stream failed" in caplog.text

    @pytest.mark.parametrize(
        ("message", "param", "with_id"),
        [
            ("not json", None, False),
            ("[]", None, False),
            ('{"type":"create","id":"x","endpoint":"completions","body":{"p":NaN}}', None, False),
            ("[" * 150 + "]" * 150, None, False),
            ('{"type":"create","body":' + '{"a":' * 150 + "1" + "}" * 151, None, False),
            ("{}", "type", False),
            ('{"type":"sing"}', "type", False),
            ('{"type":["create"]}', "type", False),
            ('{"type":"create"}', "id", False),
            ('{"type":"create","id":null}', "id", False),
            ('{"type":"create","id":true}', "id", False),
            ('{"type":"create","id":1.5}', "id", False),
            ('{"type":"create","id":""}', "id", False),
            ('{"type":"create","id":9007199254740993}', "id", False),
            ('{"type":"create","id":"' + "x" * 129 + '"}', "id", False),
            ('{"type":"create","id":{},"endpoint":"completions","body":{}}', "id", False),
            ('{"type":"cancel"}', "id", False),
            ('{"type":"create","id":"x","body":{}}', "endpoint", True),
            ('{"type":"create","id":"x","endpoint":"embeddings","body":{}}', "endpoint", True),
            ('{"type":"create","id":"x","endpoint":[],"body":{}}', "endpoint", True),
            ('{"type":"create","id":"x","endpoint":"completions"}', "body", True),
            ('{"type":"create","id":"x","endpoint":"completions","body":[]}', "body", True),
        ],
    )
    async def test_a_message_that_makes_no_sense(
        self, client: ClientConnection, message: str, param: str | None, with_id: bool
    ) -> None:
        await client.send(message)
        answer = await hear(client)
        assert answer["type"] == "error"
        assert answer["error"]["status"] == 400
        assert answer["error"]["param"] == param
        assert answer.get("id") == ("x" if with_id else None)
        await say(client, type="ping")
        assert await hear(client) == {"type": "pong"}

    async def test_a_live_id_cannot_be_taken(self, server: SocketServer, client: ClientConnection) -> None:
        await create(client, "x")
        answer = await server.endpoint.answer(0)
        await create(client, "x")
        refusal = await hear(client)
        assert "id" not in refusal, "an error with the id would be the end of the live stream"
        assert (refusal["error"]["code"], refusal["error"]["param"]) == ("duplicate_id", "id")
        answer.give({"text": "on"})
        assert await hear(client) == {"id": "x", "type": "chunk", "chunk": {"text": "on"}}

    async def test_streams_of_a_connection_are_limited(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        for number in range(9):
            await create(client, number)
        refusal = await hear(client)
        assert (refusal["id"], refusal["error"]["status"]) == (8, 429)
        assert refusal["error"]["code"] == "too_many_streams"
        (await server.endpoint.answer(0)).give(END)
        assert await hear(client) == {"id": 0, "type": "done"}
        await create(client, 9)
        await server.endpoint.answer(8)


class StuckSocket:
    """A connection whose client does not read: nothing that is sent goes out."""

    tenant = ""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.num_sending = 0
        self._changed = asyncio.Condition()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def send(self, text: bytes) -> None:
        async with self._changed:
            self.num_sending += 1
            self._changed.notify_all()
        await asyncio.Event().wait()

    async def until_sending(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: self.num_sending >= count)


async def test_streams_whose_last_message_nobody_reads_count() -> None:
    socket: Any = StuckSocket()
    endpoint = ScriptedEndpoint(registry=None)  # type: ignore[arg-type]
    endpoint.gate.set()
    nothing: Any = SimpleNamespace()
    connection = Connection(socket, nothing, {"completions": endpoint}, nothing, 4)
    message = {"type": "create", "id": "again", "endpoint": "completions", "body": {"bad": True}}
    for number in range(4):
        await connection.handle(json.dumps(message).encode())
        await socket.until_sending(number + 1)
    one_more = asyncio.create_task(connection.handle(json.dumps(message).encode()))
    # It is refused, and as the client does not read that either, nothing more is heard from it.
    await socket.until_sending(5)
    assert len(socket.tasks) == 4
    assert not one_more.done()
    for task in (one_more, *socket.tasks):
        task.cancel()


class TestCancel:
    async def test_it_ends_a_stream_with_abort_and_done(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        await create(client, "a")
        await create(client, "b")
        first, second = await server.endpoint.answer(0), await server.endpoint.answer(1)
        first.give({"text": "x"})
        assert (await hear(client))["id"] == "a"
        await say(client, type="cancel", id="a")
        assert await hear(client) == {"id": "a", "type": "chunk", "chunk": {"finish_reason": "abort"}}
        assert await hear(client) == {"id": "a", "type": "done"}
        second.give({"text": "y"})
        assert (await hear(client))["id"] == "b"

    async def test_it_ends_an_answer_in_one_piece(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        await create(client, "a", stream=False)
        await server.endpoint.answer(0)
        await say(client, type="cancel", id="a")
        assert await hear(client) == {"id": "a", "type": "result", "result": {"finish_reason": "abort"}}
        assert await hear(client) == {"id": "a", "type": "done"}

    async def test_before_the_request_is_checked(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        server.endpoint.gate.clear()
        await create(client, "a")
        await say(client, type="cancel", id="a")
        await say(client, type="ping")
        assert await hear(client) == {"type": "pong"}
        server.endpoint.gate.set()
        assert await hear(client) == {"id": "a", "type": "done"}

    async def test_it_ends_no_other_of_the_same_request_id(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        async with connect(server.url, compression=None) as elsewhere:
            await create(client, "a", request_id="same")
            await create(client, "b", request_id="same")
            await create(elsewhere, "a", request_id="same")
            answers = [await server.endpoint.answer(number) for number in range(3)]
            await say(client, type="cancel", id="a")
            assert await hear(client) == {"id": "a", "type": "chunk", "chunk": {"finish_reason": "abort"}}
            assert await hear(client) == {"id": "a", "type": "done"}
            for answer in answers[1:]:
                answer.give({"text": "goes on"})
            chunk = {"type": "chunk", "chunk": {"text": "goes on"}}
            assert await hear(client) == {"id": "b", **chunk}
            assert await hear(elsewhere) == {"id": "a", **chunk}

    async def test_of_a_stream_that_is_over_or_never_was(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        await create(client, "a")
        (await server.endpoint.answer(0)).give(END)
        assert await hear(client) == {"id": "a", "type": "done"}
        await say(client, type="cancel", id="a")
        await say(client, type="cancel", id="nobody")
        await say(client, type="ping")
        assert await hear(client) == {"type": "pong"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["create", "resume", "cancel", "ping"]) | JSON,
        "id": st.integers(0, 3) | JSON,
        "endpoint": st.just("completions") | JSON,
        "body": st.dictionaries(st.text(max_size=8), JSON, max_size=3) | JSON,
        "stream": st.just("cmpl-one") | JSON,
        "after": st.integers(0, 3) | JSON,
    },
)


@given(messages=st.lists(MESSAGES | JSON, max_size=8))
def test_no_message_breaks_a_connection(messages: list[Any]) -> None:
    """Whatever comes, what is said to it is JSON, and the next message is heard."""
    heard: list[Any] = []

    class FakeSocket:
        tenant = ""

        async def send(self, text: bytes) -> None:
            heard.append(json.loads(text))

        def start(self, work: Any) -> None:
            work.close()

    async def run() -> None:
        nothing: Any = SimpleNamespace()
        connection = Connection(FakeSocket(), nothing, {"completions": nothing}, nothing, 4)  # type: ignore
        for message in messages:
            await connection.handle(json.dumps(message).encode("utf-8", "surrogatepass"))
        await connection.handle(b'{"type":"ping"}')

    asyncio.run(run())
    assert heard.pop() == {"type": "pong"}
    for answer in heard:
        assert answer["type"] in ("pong", "error")


class TestEnds:
    async def test_binary_messages_are_refused(self, server: SocketServer, client: ClientConnection) -> None:
        await create(client, "a")
        answer = await server.endpoint.answer(0)
        await client.send(b'{"type":"ping"}')
        assert (await closed(client))[0] == 1003
        await asyncio.wait_for(answer.is_closed.wait(), WAIT_S)

    async def test_a_message_over_the_limit(self, client: ClientConnection) -> None:
        await client.send("x" * ((1 << 20) + 1))
        assert (await closed(client))[0] == 1009

    async def test_a_message_longer_than_any_useful_one_is_not_parsed(self, client: ClientConnection) -> None:
        await create(client, "a", prompt="x" * ((1 << 19) + 1))
        answer = await hear(client)
        assert "id" not in answer
        assert (answer["error"]["status"], answer["error"]["code"]) == (413, "body_too_large")

    async def test_text_that_is_not_utf8(self, client: ClientConnection) -> None:
        await client.send(b"\xff\xfe", text=True)
        assert (await closed(client))[0] == 1007

    async def test_a_message_in_many_pieces(self, client: ClientConnection) -> None:
        await client.send(list('{"type":"ping"}'))
        assert await hear(client) == {"type": "pong"}

    async def test_closing_ends_all_streams_quietly(
        self, server: SocketServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        for turn in range(100):
            async with connect(server.url, compression=None) as client:
                await create(client, 1)
                await create(client, 2, stream=False)
                answers = [await server.endpoint.answer(2 * turn + index) for index in range(2)]
                answers[0].give([{"text": "x"}] * 3)
                if turn % 2:
                    await hear(client)
                if turn % 3 == 0:
                    client.transport.abort()
                elif turn % 3 == 1:
                    answers[0].give([{"text": "y"}] * 3)
            for answer in answers:
                # The end is a step away, whatever the stream was doing.
                answer.give({"text": "z"})
                await asyncio.wait_for(answer.is_closed.wait(), WAIT_S)
        assert len(server.service.registry) == 0
        assert caplog.text == ""

    async def test_a_subprotocol_that_is_offered_is_taken(self, server: SocketServer) -> None:
        async with connect(server.url, subprotocols=["streamserve", "other"]) as client:  # type: ignore[list-item]
            assert client.subprotocol == "streamserve"


class TestDrain:
    async def test_an_idle_connection_is_closed_at_once(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        await say(client, type="ping")
        assert await hear(client) == {"type": "pong"}
        server.stop()
        assert await closed(client) == (1001, "the server is shutting down")

    async def test_streams_finish_first(self, server: SocketServer, client: ClientConnection) -> None:
        await create(client, "a")
        answer = await server.endpoint.answer(0)
        server.stop()
        answer.give({"text": "x"})
        assert (await hear(client))["chunk"] == {"text": "x"}
        await say(client, type="ping")
        assert await hear(client) == {"type": "pong"}
        answer.give(END)
        assert await hear(client) == {"id": "a", "type": "done"}
        assert (await closed(client))[0] == 1001

    async def test_a_stream_that_is_ended_says_so_first(
        self, server: SocketServer, client: ClientConnection
    ) -> None:
        await create(client, "a")
        answer = await server.endpoint.answer(0)
        server.stop()
        answer.give(EngineUnavailable("The server is shutting down."))
        assert (await hear(client))["error"]["status"] == 503
        assert (await closed(client))[0] == 1001
