"""/v1/ws against the real server: what comes is what HTTP gives, whatever clients do to their sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from server import running_server, sse_events, wait_until
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

WAIT_S = 300.0
CREATE = {"type": "create", "endpoint": "completions"}
KEY = "sesame"
BEARER = {"Authorization": f"Bearer {KEY}"}


def address(server):
    return server.url.replace("http", "ws") + "/v1/ws"


def body(number, max_tokens=40, **more):
    return {
        "prompt": f"stream number {number}",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        **more,
    }


def text_over_http(server, request):
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=WAIT_S) as response:
        assert response.status_code == 200, response.read()
        events = [json.loads(event) for event in sse_events(response) if event != "[DONE]"]
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def say(client, **message):
    await client.send(json.dumps(message))


async def hear(client):
    async with asyncio.timeout(WAIT_S):
        return json.loads(await client.recv())


def load(server):
    return httpx.get(f"{server.url}/load", headers=BEARER, timeout=WAIT_S).json()


def wait_idle(server):
    wait_until(
        lambda: (stats := load(server))["running"] == 0 and stats["waiting"] == 0, "the engine is idle"
    )


async def test_interleaved_streams_say_what_they_say_over_http(tiny_server):
    texts = dict.fromkeys(range(8), "")
    ended = set()
    turns = []
    async with connect(address(tiny_server)) as client:
        for number in texts:
            await say(client, **CREATE, id=number, body=body(number))
        while len(ended) < len(texts):
            message = await hear(client)
            number = message["id"]
            if message["type"] == "done":
                ended.add(number)
                continue
            assert message["type"] == "chunk", message
            turns.append(number)
            texts[number] += "".join(choice["text"] for choice in message["chunk"]["choices"])
    assert turns != sorted(turns), "the streams run side by side"
    for number, text in texts.items():
        assert text == await asyncio.to_thread(text_over_http, tiny_server, body(number))


async def test_cancel_frees_the_engine(tiny_server):
    async with connect(address(tiny_server)) as client:
        await say(client, **CREATE, id="long", body=body(1, 20_000))
        await hear(client)
        await say(client, type="cancel", id="long")
        while (message := await hear(client))["type"] == "chunk":
            reasons = [choice["finish_reason"] for choice in message["chunk"]["choices"]]
        assert message == {"id": "long", "type": "done"}
        assert reasons == ["abort"]
        await asyncio.to_thread(wait_idle, tiny_server)
        await say(client, type="ping")
        assert await hear(client) == {"type": "pong"}


async def test_connections_dropped_in_every_state_leave_nothing(tiny_server):
    before = await asyncio.to_thread(load, tiny_server)
    for turn in range(100):
        client = await connect(address(tiny_server))
        await say(client, **CREATE, id=1, body=body(turn, 20_000))
        await say(client, **CREATE, id=2, body=body(turn, 20_000, stream=False))
        if turn % 3:
            await hear(client)
        if turn % 2:
            client.transport.abort()
        else:
            await client.close()
    await asyncio.to_thread(wait_idle, tiny_server)
    after = await asyncio.to_thread(load, tiny_server)
    assert after["num_blocks"] == before["num_blocks"]
    assert after["free_blocks"] == after["num_blocks"]
    assert "Traceback" not in tiny_server.output


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{", None),
        ("[]", None),
        ('{"type":"create","id":"x","endpoint":"completions","body":{"prompt":NaN}}', None),
        ('{"type":"create","id":[1],"endpoint":"completions","body":{}}', "id"),
        ('{"type":"create","id":"x","endpoint":"nothing","body":{}}', "endpoint"),
        ('{"type":"create","id":"x","endpoint":"completions","body":{}}', "prompt"),
        ('{"type":"create","id":"x","endpoint":"chat.completions","body":{"messages":[]}}', "messages"),
        ('{"type":"create","id":"x","endpoint":"responses","body":{"input":[]}}', "input"),
    ],
)
async def test_bad_messages_are_answered(tiny_server, message, param):
    async with connect(address(tiny_server)) as client:
        await client.send(message)
        answer = await hear(client)
        assert (answer["type"], answer["error"]["status"], answer["error"]["param"]) == ("error", 400, param)
        await say(client, type="ping")
        assert await hear(client) == {"type": "pong"}


@pytest.mark.parametrize(
    ("message", "is_text", "code"),
    [
        (b'{"type":"ping"}', False, 1003),
        (b"\xff\xfe", True, 1007),
        (b"x" * 3_000_000, True, 1009),
    ],
)
async def test_what_is_no_message_closes(tiny_server, message, is_text, code):
    async with connect(address(tiny_server)) as client:
        # A server that closes does not wait for the rest.
        try:
            await client.send(message, text=is_text)
            async with asyncio.timeout(WAIT_S):
                await client.recv()
        except ConnectionClosed:
            pass
        assert client.close_code == code


@pytest.fixture(scope="module")
def keyed_server(tiny_model):
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=2000",
        "--stream-write-timeout=2",
        "--drain-timeout=3",
        "--ws-query-key",
        "--allowed-origins=https://page.example",
        env={"OMP_NUM_THREADS": "2", "STREAMSERVE_API_KEY": KEY},
    ) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/ws", "/v1/responses"])
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s\u00e9same"}]
)
async def test_nobody_comes_in_without_a_key(keyed_server, path, headers):
    with pytest.raises(InvalidStatus) as refused:
        await connect(keyed_server.url.replace("http", "ws") + path, additional_headers=headers)
    assert refused.value.response.status_code == 401


async def test_a_key_in_a_header(keyed_server):
    async with connect(address(keyed_server), additional_headers=BEARER) as client:
        await say(client, type="ping")
        assert await hear(client) == {"type": "pong"}


async def test_a_key_in_a_subprotocol(keyed_server):
    offered = ["streamserve", f"openai-insecure-api-key.{KEY}"]
    async with connect(address(keyed_server), subprotocols=offered) as client:
        assert client.subprotocol == "streamserve"
        await say(client, type="ping")
        assert await hear(client) == {"type": "pong"}


@pytest.mark.parametrize("path", ["/v1/ws", "/v1/responses"])
async def test_a_key_in_the_url_where_that_is_allowed(keyed_server, path):
    url = keyed_server.url.replace("http", "ws") + path
    async with connect(f"{url}?api_key={KEY}") as client:
        await client.send("{")
        assert (await hear(client))["type"] == "error"
    for wrong in ("wrong", "", "%ff", f"{KEY}x"):
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{url}?api_key={wrong}")
        assert refused.value.response.status_code == 401


def test_a_key_in_the_url_is_for_websockets_alone(keyed_server):
    assert httpx.get(f"{keyed_server.url}/v1/models?api_key={KEY}", timeout=WAIT_S).status_code == 401


def test_a_preflight_request_brings_no_key(keyed_server):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/ws"):
        for origin, status in (("https://page.example", 200), ("https://other.example", 400)):
            answer = httpx.options(
                keyed_server.url + path, headers={"Origin": origin, **asks}, timeout=WAIT_S
            )
            assert answer.status_code == status
        assert httpx.options(keyed_server.url + path, timeout=WAIT_S).status_code == 401


@pytest.mark.parametrize("key", [b"Bearer \xff\xfe", "Bearer s\u00e9same".encode(), b"\xe4\xbd\xa0 sesame"])
def test_a_key_in_no_known_alphabet_is_a_wrong_key(keyed_server, key):
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        answer = httpx.post(keyed_server.url + path, json={}, headers={b"Authorization": key}, timeout=WAIT_S)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_a_client_that_does_not_read_slows_only_itself(keyed_server):
    def hold():
        """A stream whose client never reads, and more output than all buffers hold."""
        request = body(1, 1500, n=8, logprobs=5)
        message = json.dumps({**CREATE, "id": "slow", "body": request}).encode()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(WAIT_S)
        where = urlsplit(keyed_server.url)
        sock.connect((where.hostname, where.port))
        head = (
            f"GET /v1/ws HTTP/1.1\r\nHost: {where.netloc}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        )
        sock.sendall(head.encode())
        assert sock.recv(1) == b"H"
        size = len(message)
        frame = bytes([0x81, 0x80 | 126, size >> 8, size & 255, 0, 0, 0, 0]) + message
        sock.sendall(frame)
        return sock

    stuck = await asyncio.to_thread(hold)
    try:
        async with connect(address(keyed_server), additional_headers=BEARER) as client:
            for number in range(3):
                await say(client, **CREATE, id=number, body=body(number, 30))
                while (message := await hear(client))["type"] == "chunk":
                    pass
                assert message == {"id": number, "type": "done"}
        # It is dropped when its time is up, or was done before; either way nothing is held for it.
        await asyncio.to_thread(wait_idle, keyed_server)
    finally:
        stuck.close()
    assert "Traceback" not in keyed_server.output


async def test_streams_are_told_when_the_server_stops(keyed_server):
    async with (
        connect(address(keyed_server), additional_headers=BEARER) as busy,
        connect(address(keyed_server), additional_headers=BEARER) as idle,
    ):
        await say(idle, type="ping")
        await hear(idle)
        await say(busy, **CREATE, id="short", body=body(1, 20))
        await say(busy, **CREATE, id="long", body=body(2, 2000))
        await hear(busy)
        keyed_server.process.send_signal(signal.SIGTERM)
        last = {}
        async with asyncio.timeout(WAIT_S):
            async for message in busy:
                heard = json.loads(message)
                last[heard["id"]] = heard
            await idle.wait_closed()
        assert last["short"]["type"] == "done"
        assert last["long"]["type"] in ("done", "error")
        if last["long"]["type"] == "error":
            assert last["long"]["error"]["status"] == 503
        assert (busy.close_code, idle.close_code) == (1001, 1001)
    assert await asyncio.to_thread(keyed_server.process.wait, WAIT_S) == 0
    assert "Traceback" not in keyed_server.output
