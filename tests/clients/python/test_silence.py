"""Silence before an answer is waiting; in the middle of it, it is a lost connection. Over real sockets."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from streamserve_client import StreamInterrupted, Timeouts

IDLE_S = 0.05
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNK = {"id": "1", "created": 1, "model": "tiny", "choices": [{"index": 0, "text": "Once"}]}
EVENT = f"data: {json.dumps(CHUNK)}\n\n".encode()


@asynccontextmanager
async def serving(answer):
    """A server that does `answer(writer)` for each request; yields its URL."""

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_silence_before_the_answer_is_no_failure(make_client):
    async def answer(writer):
        await asyncio.sleep(4 * IDLE_S)
        writer.write(HEAD + EVENT + b"data: [DONE]\n\n")

    async with serving(answer) as url:
        client = make_client(url=url, timeouts=Timeouts(idle_s=IDLE_S))
        assert (await client.read("completions", "")).text == "Once"
        assert client.delays == []


async def test_silence_in_a_stream_interrupts_it(make_client):
    is_over = asyncio.Event()

    async def answer(writer):
        writer.write(HEAD + EVENT)
        await is_over.wait()

    async with serving(answer) as url:
        with pytest.raises(StreamInterrupted, match="idle_s") as raised:
            await make_client(url=url, timeouts=Timeouts(idle_s=IDLE_S)).read("completions", "")
        assert raised.value.partial_text == "Once"
        is_over.set()
