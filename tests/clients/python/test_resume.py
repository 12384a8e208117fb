"""Both clients and a server that keeps streams: what is lost on the way is fetched."""

from __future__ import annotations

import json

import httpx
import pytest
from scripted_answers import HEAD, MESSAGES, SSE, USAGE, BrokenBody, Script, chat_chunk, event, refused

from streamserve_client import APIError, Retries, StreamInterrupted

STREAM = "chatcmpl-r1"
CHUNKS = (
    *(chat_chunk(text) for text in ("", "Hel", "lo", "!")),
    chat_chunk(finish_reason="stop"),
    {**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": USAGE},
)


def numbered(first, last):
    """The events from one number to another, as the server sends them."""
    events = [*map(event, CHUNKS), event("[DONE]")]
    return [f"id: {STREAM}:{number}\n{events[number - 1]}" for number in range(first, last + 1)]


NUM_EVENTS = len(CHUNKS) + 1


class KeptStream:
    """A server with one stream. Connections break where they are told to.

    Args:
        breaks: events that each connection brings; the last one brings all the rest.
        answers: of the first requests; None is the stream.
    """

    def __init__(self, *breaks, answers=()):
        self.breaks = list(breaks)
        self.answers = list(answers)
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        if request.method == "DELETE":
            return httpx.Response(200, json={})
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            if answer is not None:
                return answer
        first = 1
        if request.method == "GET":
            assert request.url.path == f"/v1/streams/{STREAM}"
            assert request.headers["Accept"] == "text/event-stream"
            first += int(request.headers.get("Last-Event-ID", ":0").removeprefix(STREAM + ":").lstrip(":"))
        else:
            assert request.headers["X-Stream-Resume"] == "1"
            assert json.loads(request.content)["request_id"] == "r1"
        last = NUM_EVENTS if not self.breaks else min(first - 1 + self.breaks.pop(0), NUM_EVENTS)
        return httpx.Response(
            200, headers={**SSE, "X-Stream-Id": STREAM}, content="".join(numbered(first, last)).encode()
        )

    @property
    def methods(self):
        return [request.method for request in self.requests]


async def read(client, **options):
    return await client.read("chat", MESSAGES, request_id="r1", **options)


@pytest.mark.parametrize("num_events", range(1, NUM_EVENTS))
async def test_a_stream_goes_on_where_it_broke_off(make_client, num_events):
    server = KeptStream(num_events)
    client = make_client(server)
    reading = await read(client)
    assert reading.text == "Hello!"
    assert reading.chunks == list(CHUNKS)
    assert server.methods == ["POST", "GET"]
    assert server.requests[1].headers["Last-Event-ID"] == f"{STREAM}:{num_events}"
    assert client.delays == [0.5]


async def test_a_stream_goes_on_whatever_byte_it_broke_off_at(make_client):
    data = "".join(numbered(1, NUM_EVENTS)).encode()
    for size in range(len(data)):
        server = KeptStream()

        def handler(request, server=server, size=size):
            answer = server(request)
            if request.method == "GET" or answer.status_code != 200:
                return answer
            return httpx.Response(200, headers=answer.headers, stream=BrokenBody(data[:size].decode()))

        reading = await make_client(handler).read("chat", MESSAGES, request_id="r1")
        assert (reading.text, reading.chunks) == ("Hello!", list(CHUNKS)), size


async def test_and_again_as_often_as_it_breaks(make_client):
    server = KeptStream(*[1] * NUM_EVENTS)
    client = make_client(server)
    assert (await read(client)).chunks == list(CHUNKS)
    # Something came each time.
    assert client.delays == [0.5] * (NUM_EVENTS - 1)


async def test_a_request_of_unknown_fate_is_not_made_twice(make_client):
    server = KeptStream(answers=[httpx.ReadError("broken")])
    reading = await read(make_client(server))
    assert reading.chunks == list(CHUNKS)
    assert server.methods == ["POST", "GET"]
    assert "Last-Event-ID" not in server.requests[1].headers


async def test_a_request_that_never_arrived_is_made_again_at_once(make_client):
    server = KeptStream(answers=[httpx.ReadError("broken"), refused(404, "stream_not_found"), None])
    client = make_client(server)
    assert (await read(client)).chunks == list(CHUNKS)
    assert server.methods == ["POST", "GET", "POST"]
    assert client.delays == [0.5]


async def test_nothing_is_asked_where_nobody_listened(make_client):
    server = KeptStream(answers=[httpx.ConnectError("refused"), None])
    assert (await read(make_client(server))).chunks == list(CHUNKS)
    assert server.methods == ["POST", "POST"]


async def test_a_request_that_arrived_late(make_client):
    """Looked for, it was not there yet; made again, it was."""
    lost, not_found, exists = (
        httpx.ReadError("broken"),
        refused(404, "stream_not_found"),
        refused(409, "stream_exists"),
    )
    server = KeptStream(answers=[lost, not_found, exists, None])
    client = make_client(server)
    assert (await read(client)).chunks == list(CHUNKS)
    assert server.methods == ["POST", "GET", "POST", "GET"]
    assert client.delays == [0.5]


async def test_a_server_that_contradicts_itself_is_given_up(make_client):
    not_found, exists = refused(404, "stream_not_found"), refused(409, "stream_exists")
    server = KeptStream(answers=[httpx.ReadError("broken"), *[not_found, exists] * 20])
    with pytest.raises(APIError) as raised:
        await read(make_client(server))
    assert raised.value.code in ("stream_exists", "stream_not_found")
    assert len(server.requests) < 10


async def test_the_id_of_another_request_is_an_error(make_client):
    server = KeptStream(answers=[refused(409, "stream_exists")])
    with pytest.raises(APIError) as raised:
        await read(make_client(server))
    assert raised.value.code == "stream_exists"
    assert server.methods == ["POST"]


@pytest.mark.parametrize(
    ("status", "code", "ends"),
    [
        (404, "stream_not_found", []),
        (409, "stream_taken", []),
        (410, "events_gone", ["DELETE"]),
        (401, "no", ["DELETE"]),
    ],
)
async def test_a_stream_that_is_gone_tells_what_had_come(make_client, status, code, ends):
    """And is ended, if it may still run and nobody else reads it."""
    server = KeptStream(3, answers=[None, refused(status, code)])
    with pytest.raises(StreamInterrupted) as raised:
        await read(make_client(server))
    assert raised.value.partial_text == "Hello"
    assert raised.value.__cause__.status == status
    assert server.methods == ["POST", "GET", *ends]


async def test_a_busy_server_says_when_to_come_back(make_client):
    busy = refused(503, "engine_unavailable", {"Retry-After": "3"})
    client = make_client(KeptStream(3, answers=[None, httpx.ConnectError("refused"), busy, None]))
    assert (await read(client)).chunks == list(CHUNKS)
    assert client.delays == [0.5, 1.0, 5.0]


async def test_the_wait_ends(make_client):
    server = KeptStream(3, answers=[None, *[httpx.ConnectError("refused")] * 100])
    client = make_client(server, retries=Retries(resume_s=20, chance=lambda: 1.0))
    with pytest.raises(StreamInterrupted) as raised:
        await read(client)
    assert raised.value.partial_text == "Hello"
    assert sum(client.delays) == 20
    assert max(client.delays) == 5


async def test_the_streams_own_failure_is_final(make_client):
    error = {"error": {"message": "No.", "type": "server_error", "param": None, "code": "failed"}}
    events = [*numbered(1, 3), f"id: {STREAM}:4\n{event(error)}"]
    headers = {**SSE, "X-Stream-Id": STREAM}
    server = KeptStream(answers=[httpx.Response(200, headers=headers, content="".join(events).encode())])
    with pytest.raises(APIError) as raised:
        await read(make_client(server))
    assert raised.value.code == "failed"
    assert server.methods == ["POST"]


@pytest.mark.parametrize("num_events", [1, 3])
async def test_leaving_ends_it_on_the_server(make_client, num_events):
    server = KeptStream()
    reading = await read(make_client(server), limit=num_events)
    assert reading.chunks == list(CHUNKS[:num_events])
    assert server.methods == ["POST", "DELETE"]
    assert server.requests[1].url.path == f"/v1/streams/{STREAM}"


async def test_reading_to_the_end_leaves_nothing_to_end(make_client):
    server = KeptStream()
    await read(make_client(server))
    assert server.methods == ["POST"]


async def test_it_can_be_turned_off(make_client):
    answer = httpx.Response(200, headers=SSE, content="".join(map(event, CHUNKS[:3])).encode())
    script = Script(answer)
    with pytest.raises(StreamInterrupted):
        await read(make_client(script, retries=Retries(resume_s=0)))
    assert "X-Stream-Resume" not in script.requests[0].headers
    assert "X-Request-Id" not in script.requests[0].headers
    assert len(script.requests) == 1


async def test_each_request_has_an_id_of_its_own(make_client):
    answers = [httpx.Response(200, headers=SSE, content=event("[DONE]").encode()) for _ in range(2)]
    script = Script(*answers)
    client = make_client(script)
    for _ in range(2):
        with pytest.raises(Exception, match="nothing of the answer has come"):
            await client.read("chat", MESSAGES)
    ids = {request.headers["X-Request-Id"] for request in script.requests}
    assert len(ids) == 2
    assert min(map(len, ids)) == 32


WAITING = {"message": "too late", "type": "service_unavailable_error", "param": None, "code": "x"}


def late(**error):
    """A stream that had to wait for its first event, and has come to nothing."""
    text = f": ping\n\n{event({'error': {**WAITING, **error}})}"
    return httpx.Response(200, headers={**SSE, "X-Stream-Id": STREAM}, content=text.encode())


async def test_a_refusal_after_a_wait_is_one(make_client):
    server = KeptStream(answers=[late(status=503, retry_after=7), httpx.ConnectError("gone")])
    client = make_client(server)
    assert (await read(client)).text == "Hello!"
    assert server.methods == ["POST", "POST", "POST"]
    assert client.delays[0] == 7.5


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_after_a_wait_has_its_status(make_client, status):
    server = KeptStream(answers=[late(status=status)])
    with pytest.raises(APIError, match="too late") as raised:
        await read(make_client(server))
    assert (raised.value.status, raised.value.code) == (status, "x")
    assert server.methods == ["POST"]


async def test_a_refusal_after_coming_back_and_a_wait_is_one(make_client):
    server = KeptStream(answers=[httpx.ReadError("gone"), late(status=503, retry_after=1)])
    assert (await read(make_client(server))).text == "Hello!"
    assert server.methods == ["POST", "GET", "POST"]
