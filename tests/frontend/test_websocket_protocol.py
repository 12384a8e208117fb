"""The WebSocket protocol under clients that are slow, silent or strange."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from scripted_endpoint import END, WAIT_S, SocketServer, socket_server
from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from streamserve.frontend import farewell
from streamserve.frontend.api.resume import Resumption
from streamserve.frontend.api.websocket import StreamSocket

# More than all buffers between server and client hold.
BIG = "x" * 200_000
NUM_BIG = 100


def streams(service: Any, endpoint: Any) -> StreamSocket:
    return StreamSocket(service, {"completions": endpoint}, Resumption(service))


class RawClient:
    """A client that reads, answers and closes only when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.protocol = ClientProtocol(parse_uri("ws://test/"))

    def flush(self) -> None:
        for data in self.protocol.data_to_send():
            self.writer.write(data)

    async def open(self) -> None:
        self.protocol.send_request(self.protocol.connect())
        self.flush()
        while True:
            self.protocol.receive_data(await self.reader.read(4096))
            if any(isinstance(event, Response) for event in self.protocol.events_received()):
                return

    async def create(self, stream_id: str) -> None:
        body = {"type": "create", "id": stream_id, "endpoint": "completions", "body": {"stream": True}}
        self.protocol.send_text(json.dumps(body).encode())
        self.flush()
        await self.writer.drain()

    async def frames(self) -> AsyncIterator[Frame]:
        """All that comes; pings get no answer."""
        while True:
            data = await self.reader.read(65536)
            if not data:
                return
            self.protocol.receive_data(data)
            for event in self.protocol.events_received():
                assert isinstance(event, Frame)
                yield event

    async def close_frame(self) -> tuple[int, str]:
        async with asyncio.timeout(WAIT_S):
            async for frame in self.frames():
                if frame.opcode is Opcode.CLOSE:
                    return int.from_bytes(frame.data[:2]), bytes(frame.data[2:]).decode()
        raise AssertionError("the connection ended without a close frame")


@asynccontextmanager
async def raw_client(server: SocketServer) -> AsyncIterator[RawClient]:
    address = urlsplit(server.url)
    sock = socket.socket()
    # Small, so that little is on the way.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    client = RawClient(reader, writer)
    await client.open()
    try:
        yield client
    finally:
        writer.transport.abort()


async def hear(client: ClientConnection) -> Any:
    async with asyncio.timeout(WAIT_S):
        return json.loads(await client.recv())


async def create(client: ClientConnection, stream_id: str) -> None:
    body = {"type": "create", "id": stream_id, "endpoint": "completions", "body": {"stream": True}}
    await client.send(json.dumps(body))


class TestSlowReaders:
    async def test_one_that_never_reads_is_closed_and_frees_its_streams(self) -> None:
        async with socket_server(streams, write_timeout_s=0.5) as server, raw_client(server) as slow:
            await slow.create("a")
            answer = await server.endpoint.answer(0)
            for _ in range(NUM_BIG):
                answer.give({"text": BIG})
            await asyncio.wait_for(answer.is_closed.wait(), WAIT_S)
            assert await slow.close_frame() == (1008, "slow consumer")

    async def test_one_that_sends_and_reads_only_afterwards_is_told_why(self) -> None:
        async with socket_server(streams, write_timeout_s=0.5) as server, raw_client(server) as slow:
            await slow.create("a")
            answer = await server.endpoint.answer(0)
            for _ in range(NUM_BIG):
                answer.give({"text": BIG})
            # Pings are answered: the server comes to wait until that is read, and reads no more itself.
            for _ in range(60):
                slow.protocol.send_text(json.dumps({"type": "ping", "padding": "x" * 500_000}).encode())
                slow.flush()
                async with asyncio.timeout(WAIT_S):
                    await slow.writer.drain()
            assert await slow.close_frame() == (1008, "slow consumer")

    async def test_one_that_reads_slowly_gets_everything(self) -> None:
        async with socket_server(streams, write_timeout_s=30.0) as server, raw_client(server) as slow:
            await slow.create("a")
            answer = await server.endpoint.answer(0)
            for number in range(20):
                answer.give({"text": BIG, "number": number})
            answer.give(END)
            numbers, message = [], b""
            async with asyncio.timeout(WAIT_S):
                async for frame in slow.frames():
                    await asyncio.sleep(0)
                    message += frame.data
                    if frame.fin:
                        heard, message = json.loads(message), b""
                        if heard["type"] == "done":
                            break
                        numbers.append(heard["chunk"]["number"])
            assert numbers == list(range(20))

    async def test_others_go_on_meanwhile(self) -> None:
        async with (
            socket_server(streams) as server,
            raw_client(server) as slow,
            connect(server.url, compression=None) as quick,
        ):
            await slow.create("a")
            stuck = await server.endpoint.answer(0)
            for _ in range(NUM_BIG):
                stuck.give({"text": BIG})
            await create(quick, "b")
            answer = await server.endpoint.answer(1)
            for number in range(200):
                answer.give({"number": number})
                assert (await hear(quick))["chunk"] == {"number": number}
            assert not stuck.is_closed.is_set()

    async def test_a_draining_server_does_not_wait_for_one(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        async with socket_server(streams, graceful_s=2) as server, raw_client(server) as slow:
            await slow.create("a")
            answer = await server.endpoint.answer(0)
            for _ in range(NUM_BIG):
                answer.give({"text": BIG})
            (connection,) = server.server.server_state.connections
            async with asyncio.timeout(WAIT_S):
                while connection.writable.is_set():  # type: ignore[union-attr]  # noqa: ASYNC110
                    await asyncio.sleep(0)
            server.stop()
            await asyncio.wait_for(answer.is_closed.wait(), WAIT_S)
        assert caplog.text == ""

    async def test_a_closed_connection_does_not_linger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(farewell, "MAX_SILENCE_S", 0.3)
        async with socket_server(streams) as server, raw_client(server) as rude:
            rude.protocol.send_binary(b"x")
            rude.flush()
            # It is told to close, and never agrees.
            assert (await rude.close_frame())[0] == 1003
            connections = server.server.server_state.connections
            async with asyncio.timeout(WAIT_S):
                while connections:  # noqa: ASYNC110  (it goes when a timer says so)
                    await asyncio.sleep(0.05)


class TestSilence:
    async def test_a_client_that_answers_no_ping_is_closed(self) -> None:
        async with (
            socket_server(streams, ping_interval_s=0.1, ping_timeout_s=0.2) as server,
            raw_client(server) as silent,
        ):
            assert await silent.close_frame() == (1011, "no pong")

    async def test_a_client_that_answers_is_kept(self) -> None:
        async with (
            socket_server(streams, ping_interval_s=0.05, ping_timeout_s=5.0) as server,
            raw_client(server) as client,
        ):
            num_pings = 0
            async with asyncio.timeout(WAIT_S):
                async for frame in client.frames():
                    assert frame.opcode is Opcode.PING
                    # The library has made the pong already.
                    client.flush()
                    num_pings += 1
                    if num_pings == 5:
                        return

    async def test_whatever_a_client_sends_counts_as_a_pong(self) -> None:
        async with (
            socket_server(streams, ping_interval_s=0.1, ping_timeout_s=0.3) as server,
            raw_client(server) as client,
        ):
            num_pings = 0
            async with asyncio.timeout(WAIT_S):
                async for frame in client.frames():
                    if frame.opcode is Opcode.PING:
                        num_pings += 1
                        client.protocol.data_to_send()
                        client.protocol.send_text(b'{"type":"ping"}')
                        client.flush()
                    assert frame.opcode is not Opcode.CLOSE
                    if num_pings == 4:
                        return

    async def test_data_before_a_ping_gives_more_time(self) -> None:
        async with (
            socket_server(streams, ping_interval_s=0.1, ping_timeout_s=0.1, write_timeout_s=1.5) as server,
            raw_client(server) as client,
        ):
            loop = asyncio.get_running_loop()
            await client.create("a")
            (await server.endpoint.answer(0)).give({"text": "x"})
            started_s = loop.time()
            assert await client.close_frame() == (1008, "slow consumer")
            assert loop.time() - started_s >= 1.4

    async def test_a_blocked_loop_costs_nobody_the_connection(self) -> None:
        async with (
            socket_server(streams, ping_interval_s=0.05, ping_timeout_s=0.1) as server,
            raw_client(server) as client,
        ):
            async for frame in client.frames():
                assert frame.opcode is Opcode.PING
                break
            # The pong is there, and the time is up, before the server looks.
            client.flush()
            await asyncio.sleep(0)
            (connection,) = server.server.server_state.connections
            connection.keepalive_timeout()  # type: ignore[union-attr]
            async with asyncio.timeout(WAIT_S):
                async for frame in client.frames():
                    assert frame.opcode is Opcode.PING
                    return


class TestFloods:
    async def test_many_pings_are_answered_by_a_few_pongs_while_nobody_reads(self) -> None:
        async with socket_server(streams) as server, raw_client(server) as client:
            await client.create("a")
            answer = await server.endpoint.answer(0)
            for _ in range(NUM_BIG):
                answer.give({"text": BIG})
            (connection,) = server.server.server_state.connections
            async with asyncio.timeout(WAIT_S):
                while connection.writable.is_set():  # type: ignore[union-attr]  # noqa: ASYNC110
                    await asyncio.sleep(0)
            transport = connection.transport  # type: ignore[union-attr]
            before = transport.get_write_buffer_size()
            for number in range(20_000):
                client.protocol.send_ping(number.to_bytes(100))
                client.flush()
            async with asyncio.timeout(WAIT_S):
                while client.writer.transport.get_write_buffer_size():  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert transport.get_write_buffer_size() <= before
            pongs = 0
            async with asyncio.timeout(WAIT_S):
                async for frame in client.frames():
                    pongs += frame.opcode is Opcode.PONG
                    if pongs and int.from_bytes(frame.data) == 19_999:
                        break
            assert pongs < 100

    async def test_pieces_of_a_message_cost_what_they_hold(self) -> None:
        async with (
            socket_server(streams) as server,
            connect(server.url, compression=None) as client,
        ):
            text = json.dumps({"type": "ping", "padding": "x" * 20_000})
            await client.send(text[at : at + 1] for at in range(len(text)))
            assert await hear(client) == {"type": "pong"}

    async def test_pieces_count_together_towards_the_limit(self) -> None:
        async with (
            socket_server(streams, max_size=10_000) as server,
            connect(server.url, compression=None) as client,
        ):
            with contextlib.suppress(ConnectionClosed):
                await client.send("x" * 100 for _ in range(200))
            with pytest.raises(ConnectionClosed):
                await hear(client)
            assert client.close_code == 1009
