"""Readers of events that know nothing of OpenAI: aiohttp, httpx and `websockets`."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from server import wait_idle
from ways_in import sse_data
from websockets.asyncio.client import connect

pytestmark = pytest.mark.clients
aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me about rivers."}],
    "max_tokens": 30,
    "temperature": 0,
}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
PATH = "/v1/chat/completions"


@pytest.fixture
def text(tiny_server):
    answer = httpx.post(tiny_server.url + PATH, json=BODY, timeout=300).raise_for_status().json()
    return answer["choices"][0]["message"]["content"]


def text_of(chunks):
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def test_aiohttp_line_by_line(tiny_server, text):
    chunks = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(tiny_server.url + PATH, json=STREAM) as response,
    ):
        assert response.status == 200
        async for raw in response.content:
            line = raw.decode().strip()
            if not line or line.startswith(":"):
                continue
            # As benchmark tools have it.
            data = line.removeprefix("data: ")
            assert data != line
            if data == "[DONE]":
                break
            chunks.append(json.loads(data))
    assert text_of(chunks) == text
    assert chunks[-1]["usage"]["completion_tokens"] > 0


async def test_aiohttp_piece_by_piece(tiny_server, text):
    """Pieces as the network delivers them, which end where they like."""
    buffered = ""
    chunks = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(tiny_server.url + PATH, json=STREAM) as response,
    ):
        async for piece in response.content.iter_chunked(7):
            buffered += piece.decode("utf-8", "surrogateescape")
            while "\n\n" in (buffered := buffered.replace("\r\n", "\n")):
                event, _, buffered = buffered.partition("\n\n")
                chunks.append(event.encode("utf-8", "surrogateescape").decode())
    assert buffered == ""
    assert text_of(sse_data("\n\n".join(chunks) + "\n\n", ends_with_done=True)) == text


async def test_aiohttp_many_at_once_and_gone(tiny_server, text):
    async def whole(session):
        async with session.post(tiny_server.url + PATH, json=STREAM) as response:
            return text_of(sse_data(await response.text(), ends_with_done=True))

    async def impatient(session):
        async with session.post(tiny_server.url + PATH, json={**STREAM, "max_tokens": 20_000}) as response:
            await response.content.readline()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        answers = await asyncio.gather(
            *(whole(session) for _ in range(16)), *(impatient(session) for _ in range(16))
        )
    assert set(answers) == {text, None}
    await asyncio.to_thread(wait_idle, tiny_server)


@pytest.mark.parametrize("read", ["iter_lines", "iter_text", "iter_raw"])
def test_httpx(tiny_server, text, read):
    with httpx.stream("POST", tiny_server.url + PATH, json=STREAM, timeout=300) as response:
        pieces = list(getattr(response, read)())
    if read == "iter_lines":
        whole = "\n".join(pieces) + "\n"
    else:
        whole = b"".join(pieces).decode() if read == "iter_raw" else "".join(pieces)
    assert text_of(sse_data(whole.rstrip("\n") + "\n\n", ends_with_done=True)) == text


async def test_httpx_async_reads_the_first_event_while_the_rest_is_made(tiny_server):
    async with (
        httpx.AsyncClient(timeout=300) as client,
        client.stream("POST", tiny_server.url + PATH, json={**STREAM, "max_tokens": 20_000}) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                break
        now = (await client.get(f"{tiny_server.url}/load")).json()
        assert now["running"] >= 1
    await asyncio.to_thread(wait_idle, tiny_server)


async def test_websockets_with_and_without_compression(tiny_server, text):
    for compression in ("deflate", None):
        url = tiny_server.url.replace("http", "ws", 1) + "/v1/ws"
        async with connect(url, compression=compression) as socket:
            create = {"type": "create", "id": "a", "endpoint": "chat.completions", "body": STREAM}
            await socket.send(json.dumps(create))
            chunks = []
            async for message in socket:
                heard = json.loads(message)
                if heard["type"] == "done":
                    break
                chunks.append(heard["chunk"])
        assert text_of(chunks) == text
