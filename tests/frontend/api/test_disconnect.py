"""Clients that leave, at any moment, on a real socket: the engine is told at once, and exactly once."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from streamserve.messages import Finish


@pytest.fixture
async def server(run_harness: Any) -> AsyncIterator[tuple[Any, str]]:
    async with run_harness() as frontend, frontend.served() as url:
        yield frontend, url


class Client:
    """A raw HTTP/1.1 connection with one request on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def post(cls, url: str, path: str, body: dict[str, Any], sock: Any = None) -> Client:
        host, port = url.removeprefix("http://").split(":")
        if sock is None:
            reader, writer = await asyncio.open_connection(host, int(port))
        else:
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            reader, writer = await asyncio.open_connection(sock=sock)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + f"content-length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        return cls(reader, writer)

    async def leave(self) -> None:
        # An abort, as kill -9 of the client does it: no orderly end of the stream.
        self.writer.transport.abort()
        await asyncio.wait([asyncio.ensure_future(self.writer.wait_closed())])


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "ignore_eos": True}
COMPLETION = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}
KINDS = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)


@KINDS
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_queued_or_in_prefill(
    server: tuple[Any, str], path: str, body: dict[str, Any], stream: bool
) -> None:
    frontend, url = server
    engine = frontend.engine
    engine.is_automatic = False
    client = await Client.post(url, path, {**body, "stream": stream})
    await engine.until(lambda: len(engine.adds) == 1)
    await client.leave()
    await engine.until(lambda: bool(engine.aborts))
    assert engine.aborts == [engine.adds[0].stream]
    assert engine.num_steps == 0
    assert len(frontend.streams) == 0


@KINDS
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_during_decode_costs_at_most_a_step(
    server: tuple[Any, str], path: str, body: dict[str, Any], stream: bool
) -> None:
    frontend, url = server
    engine = frontend.engine
    engine.is_automatic = False
    client = await Client.post(url, path, {**body, "stream": stream})
    await engine.until(lambda: len(engine.adds) == 1)
    engine.step()
    if stream:
        await client.reader.readuntil(b"data: ")
    await client.leave()
    await engine.until(lambda: bool(engine.aborts))
    assert engine.aborts == [engine.adds[0].stream]
    assert engine.num_steps == 1
    assert not engine.live


@pytest.mark.parametrize("stream", [False, True])
async def test_many_that_leave_at_once(server: tuple[Any, str], stream: bool) -> None:
    frontend, url = server
    engine = frontend.engine
    clients = [
        await Client.post(url, "/v1/completions", {**COMPLETION, "max_tokens": 480, "stream": stream})
        for _ in range(16)
    ]
    engine.is_automatic = False
    await engine.until(lambda: len(engine.adds) == 16)
    for client in clients:
        await client.leave()
    await engine.until(lambda: not engine.live)
    await frontend.until(lambda: not frontend.streams)
    assert len(engine.aborts) == len(set(engine.aborts))
    assert set(engine.aborts) <= {add.stream for add in engine.adds}
    assert frontend.client.admission.waiting == 0


async def test_a_queued_request_whose_client_left_is_not_run(server: tuple[Any, str]) -> None:
    frontend, url = server
    engine = frontend.engine
    engine.is_automatic, engine.max_running = False, 1
    first = await Client.post(url, "/v1/completions", {**COMPLETION, "max_tokens": 2, "stream": True})
    await engine.until(lambda: len(engine.adds) == 1)
    queued = [await Client.post(url, "/v1/completions", COMPLETION) for _ in range(20)]
    await engine.until(lambda: len(engine.adds) == 21)
    for client in queued:
        await client.leave()
    await engine.until(lambda: len(engine.aborts) == 20)
    fresh = await Client.post(url, "/v1/completions", {**COMPLETION, "max_tokens": 1, "stream": True})
    await engine.until(lambda: len(engine.adds) == 22)
    for _ in range(3):
        engine.step()
    assert b"[DONE]" in await first.reader.readuntil(b"[DONE]")
    assert b"[DONE]" in await fresh.reader.readuntil(b"[DONE]")
    assert engine.num_steps == 3
    for client in (first, fresh):
        await client.leave()


async def test_a_new_request_under_the_same_id_is_independent(server: tuple[Any, str]) -> None:
    frontend, url = server
    engine = frontend.engine
    engine.is_automatic = False
    left = await Client.post(url, "/v1/completions", {**COMPLETION, "stream": True})
    await engine.until(lambda: len(engine.adds) == 1)
    engine.step()
    await left.reader.readuntil(b"data: ")
    await left.leave()
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, asyncio.TaskGroup() as group:
        body = {**COMPLETION, "max_tokens": 5}
        asked = group.create_task(http.post("/v1/completions", json=body))
        await engine.until(lambda: len(engine.adds) == 2 and bool(engine.aborts))
        old, new = (add.stream for add in engine.adds)
        # The slot may be the same; a late frame for the old stream must not reach the new one.
        engine.push_step([old], [1], [Finish.STOP], [7])
        while engine.step():
            pass
    assert old != new
    assert asked.result().json()["usage"]["completion_tokens"] == 5
    assert engine.aborts == [old]


async def test_a_finished_stream_is_not_aborted(server: tuple[Any, str]) -> None:
    frontend, url = server
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for stream in (False, True):
            answer = await http.post(
                "/v1/completions", json={**COMPLETION, "max_tokens": 3, "stream": stream}
            )
            assert answer.status_code == 200
    assert frontend.engine.aborts == []


async def test_leaving_while_the_body_is_still_on_its_way(server: tuple[Any, str]) -> None:
    frontend, url = server
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.transport.abort()
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        assert (await http.get("/health")).status_code == 200
    assert frontend.engine.adds == []


async def test_a_client_that_does_not_read_is_dropped_and_holds_up_nobody(
    run_harness: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"write_timeout_s": 0.3, "max_model_len": 10**9, "kv_capacity_tokens": 10**9}
    async with run_harness(**options) as frontend, frontend.served() as url:
        engine = frontend.engine
        engine.tokens_per_step = 50
        text = frontend.encode("\x01" * 50)
        engine.script = lambda _request: text
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": "x", "max_tokens": 10**8, "stream": True}
        stuck = await Client.post(url, "/v1/completions", body, sock)
        stuck.writer.transport.pause_reading()
        await engine.until(lambda: len(engine.adds) == 1)
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for _ in range(5):
                other = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 500})
                assert other.json()["usage"]["completion_tokens"] == 500
        await engine.until(lambda: bool(engine.aborts))
        assert engine.aborts == [engine.adds[0].stream]
        await frontend.until(lambda: not frontend.streams and not frontend.server.server_state.connections)
        await stuck.leave()
    assert not caplog.records


async def test_a_slow_client_gets_merged_deltas_and_the_whole_text(server: tuple[Any, str]) -> None:
    frontend, url = server
    engine = frontend.engine
    engine.is_automatic = False
    client = await Client.post(url, "/v1/completions", {**COMPLETION, "max_tokens": 40, "stream": True})
    await engine.until(lambda: len(engine.adds) == 1)
    # All steps before the stream's task runs once: what waits is one delta, not forty.
    while engine.step():
        pass
    body = await client.reader.readuntil(b"[DONE]")
    assert body.count(b"data: {") <= 3
    text = "".join(
        json.loads(line[6:])["choices"][0]["text"]
        for line in body.decode().splitlines()
        if line.startswith("data: {")
    )
    prompt = frontend.encode("hello")
    assert text == frontend.decode((prompt * 40)[:40])
    await client.leave()


async def test_silence_is_filled_with_comments(run_harness: Any) -> None:
    async with run_harness(ping_interval_s=0.05) as frontend, frontend.served() as url:
        engine = frontend.engine
        engine.is_automatic = False
        client = await Client.post(url, "/v1/completions", {**COMPLETION, "max_tokens": 2, "stream": True})
        await engine.until(lambda: len(engine.adds) == 1)
        engine.step()
        body = await client.reader.readuntil(b": ping\n\n")
        assert body.count(b"data: ") == 1
        engine.step()
        assert b"[DONE]" in await client.reader.readuntil(b"[DONE]\n\n")
        await client.leave()
