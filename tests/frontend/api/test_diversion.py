"""Chunks that go from the pump to the socket without waking a task, on a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from streamserve.frontend.api import choice_stream
from streamserve.frontend.api.choice import MAX_TOLD
from streamserve.frontend.api.logprobs import CompletionLogprobs
from streamserve.messages import Finish


@pytest.fixture
async def server(run_harness: Any) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    async with run_harness() as frontend, frontend.served() as url:
        frontend.engine.is_automatic = False
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            yield frontend, http


class Reader:
    """One stream, read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def next(self) -> Any:
        async for line in self._lines:
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                return data if data == "[DONE]" else json.loads(data)
        return None

    async def rest(self) -> list[Any]:
        found = []
        while (event := await self.next()) is not None:
            found.append(event)
        return found


async def begin(frontend: Any, http: httpx.AsyncClient, **fields: Any) -> Reader:
    """A stream that has had its first token."""
    body = {"prompt": "hello", "stream": True, "max_tokens": 50, "ignore_eos": True, **fields}
    request = http.build_request("POST", "/v1/completions", json=body)
    sending = asyncio.ensure_future(http.send(request, stream=True))
    count = len(frontend.engine.adds) + 1
    await frontend.engine.until(lambda: len(frontend.engine.adds) == count)
    frontend.engine.step()
    reader = Reader(await sending)
    assert (await reader.next())["choices"][0]["text"]
    await frontend.until(lambda: is_diverted(frontend))
    return reader


def is_diverted(frontend: Any) -> bool:
    box = frontend.streams.find(frontend.engine.adds[-1].stream)
    return box is not None and box.listener is not None and box.listener.__self__._diversion is not None


async def test_each_step_is_written_in_its_own_turn(server: tuple[Any, httpx.AsyncClient]) -> None:
    frontend, http = server
    reader = await begin(frontend, http, max_tokens=5)
    ids = (frontend.encode("hello") * 5)[:5]
    for token in ids[1:4]:
        frontend.engine.step()
        assert (await reader.next())["choices"][0]["text"] == frontend.decode([token])
    frontend.engine.step()
    *texts, finish, done = await reader.rest()
    assert [chunk["choices"][0]["text"] for chunk in texts] == [frontend.decode(ids[4:])]
    assert (finish["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert frontend.engine.aborts == []


async def test_a_failure_is_the_last_event(server: tuple[Any, httpx.AsyncClient]) -> None:
    frontend, http = server
    reader = await begin(frontend, http)
    frontend.engine.finish(frontend.engine.adds[0].stream, Finish.ERROR)
    (last,) = await reader.rest()
    assert last["error"]["code"] == "request_failed"
    registry = frontend.service.registry
    assert registry.metrics.finished["error"].value == 1
    await frontend.until(lambda: len(registry) == 0)


async def test_the_end_of_the_engine_is_the_last_event(server: tuple[Any, httpx.AsyncClient]) -> None:
    frontend, http = server
    reader = await begin(frontend, http)
    frontend.client.fail_all("The server is shutting down.")
    (last,) = await reader.rest()
    assert last["error"]["code"] == "engine_unavailable"


async def test_a_cancelled_answer_ends_with_what_it_has(server: tuple[Any, httpx.AsyncClient]) -> None:
    frontend, http = server
    reader = await begin(frontend, http, stream_options={"include_usage": True})
    (record,) = frontend.service.registry.all(None)
    record.cancel()
    finish, usage, done = await reader.rest()
    assert (finish["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
    assert usage["usage"]["completion_tokens"] == 1
    assert frontend.engine.aborts == [frontend.engine.adds[0].stream]


async def test_a_fault_of_our_own_is_one_streams_only(
    server: tuple[Any, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frontend, http = server
    accept = choice_stream.ChoiceStream.accept

    def faulty(self: Any, delta: Any) -> Any:
        if 13 in delta.tokens:
            raise ZeroDivisionError
        return accept(self, delta)

    monkeypatch.setattr(choice_stream.ChoiceStream, "accept", faulty)
    frontend.engine.script = lambda request: [5, 6, 13 if request.params.seed else 7, 8]
    bad = await begin(frontend, http, seed=1)
    good = await begin(frontend, http, seed=0, max_tokens=3)
    frontend.engine.step()
    frontend.engine.step()
    assert (await bad.rest())[-1]["error"]["code"] == "internal_error"
    assert (await good.rest())[-1] == "[DONE]"
    assert "a stream failed" in caplog.text


async def test_a_client_that_leaves_ends_the_request(server: tuple[Any, httpx.AsyncClient]) -> None:
    frontend, http = server
    reader = await begin(frontend, http)
    frontend.engine.step()
    await reader.response.aclose()
    await frontend.engine.until(lambda: bool(frontend.engine.aborts))
    assert frontend.engine.aborts == [frontend.engine.adds[0].stream]
    await frontend.until(lambda: not frontend.streams)


async def test_a_client_that_pauses_gets_all_of_it_merged(run_harness: Any) -> None:
    options = {"max_model_len": 10**9, "kv_capacity_tokens": 10**9}
    async with run_harness(**options) as frontend, frontend.served() as url:
        engine = frontend.engine
        engine.is_automatic, engine.tokens_per_step = False, 2000
        text = frontend.encode("one two three \x01\x02 four five \x03\x04 ")
        engine.script = lambda _request: text
        num_steps = 1000
        client = await SlowClient.connect(
            url, {"prompt": "x", "max_tokens": 2000 * num_steps, "stream": True}
        )
        await engine.until(lambda: len(engine.adds) == 1)
        engine.step()
        await frontend.until(lambda: is_diverted(frontend))
        box = frontend.streams.find(engine.adds[0].stream)
        num_waited = 0
        for _ in range(num_steps - 1):
            engine.step()
            await asyncio.sleep(0)
            num_waited += not is_diverted(frontend)
        # The socket was full, and what came then waits in one piece.
        await frontend.until(lambda: bool(box.finish))
        assert num_waited > 100
        shown, num_events = await client.read_all()
        assert shown == frontend.decode((text * (2000 * num_steps // len(text) + 1))[: 2000 * num_steps])
        assert num_events < num_steps - 100


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many tokens log probabilities were made at once, each time."""
    found: list[int] = []
    render = CompletionLogprobs.render

    def watched(self: Any, tokens: Any) -> Any:
        found.append(len(tokens))
        return render(self, tokens)

    monkeypatch.setattr(CompletionLogprobs, "render", watched)
    return found


@pytest.mark.parametrize("n", [1, 2])
async def test_what_has_waited_for_long_is_told_in_portions(
    run_harness: Any, lengths: list[int], n: int
) -> None:
    options = {"max_model_len": 10**9, "kv_capacity_tokens": 10**9}
    async with run_harness(**options) as frontend, frontend.served() as url:
        engine = frontend.engine
        engine.is_automatic, engine.tokens_per_step = False, 200
        engine.script = lambda _request: frontend.encode("one two three \x01\x02\x03")
        num_tokens = 80_000 // n
        body = {"prompt": "x", "max_tokens": num_tokens, "logprobs": 5, "n": n, "stream": True}
        client = await SlowClient.connect(url, body)
        await engine.until(lambda: len(engine.live) == n)
        while engine.step():  # noqa: ASYNC110  (a step each turn, for which there is no event)
            await asyncio.sleep(0)
        text, _ = await client.read_all()
        assert len(text) == n * len(frontend.decode((engine.script(None) * num_tokens)[:num_tokens]))
        assert sum(lengths) == n * num_tokens
        assert max(lengths) == MAX_TOLD


@pytest.mark.parametrize("stream", [False, True])
async def test_so_is_what_is_no_text(
    server: tuple[Any, httpx.AsyncClient], lengths: list[int], stream: bool
) -> None:
    frontend, http = server
    frontend.engine.is_automatic, frontend.engine.tokens_per_step = True, 7
    special = frontend.service.tokenizer.tokenizer.token_to_id("<|im_start|>")
    frontend.engine.script = lambda _request: [special]
    body = {"prompt": "x", "max_tokens": 500, "logprobs": 0, "n": 2, "stream": stream}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200
    told = [line for line in response.text.split("\n") if '"token_logprobs"' in line]
    # Each as the token that is there, and as one that was likely.
    assert sum(line.count("-0.5") for line in told) == 2 * 1000
    assert max(lengths) == MAX_TOLD


PROMPTS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"max_tokens": 10**8}),
        ("/v1/completions", {"max_tokens": 10**8, "n": 2}),
        ("/v1/chat/completions", {"logprobs": True}),
        ("/v1/responses", {}),
    ],
)
async def test_a_stop_string_ends_the_generation_before_the_client_has_read_so_far(
    run_harness: Any, path: str, fields: dict[str, Any]
) -> None:
    options = {"max_model_len": 10**9, "kv_capacity_tokens": 10**9}
    async with run_harness(**options) as frontend, frontend.served() as url:
        engine = frontend.engine
        engine.is_automatic, engine.tokens_per_step = False, 200
        engine.script = lambda _request: frontend.encode("\x01\x02\x03\x04\x05")
        body = {**PROMPTS[path], **fields, "stop": ["the end"], "ignore_eos": True, "stream": True}
        client = await SlowClient.connect(url, body, path)
        count = fields.get("n", 1)
        await engine.until(lambda: len(engine.live) == count)
        # More than all buffers on the way hold.
        for _ in range(400 if "logprobs" in fields else 4000 // count):
            engine.step()
            await asyncio.sleep(0)
        assert not engine.aborts
        for row in engine.live:
            row.script = frontend.encode("the end")
        engine.step()
        await engine.until(lambda: not engine.live)
        assert len(engine.aborts) == count
        await client.close()


class SlowClient:
    """A connection with one stream on it, of which nothing is read at first."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, url: str, body: dict[str, Any], path: str = "/v1/completions") -> SlowClient:
        host, port = url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 26)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        writer.transport.pause_reading()
        return cls(reader, writer)

    async def read_all(self) -> tuple[str, int]:
        """The text of all events, and how many there were; closes the connection."""
        self._writer.transport.resume_reading()
        texts: list[str] = []
        while (line := (await self._reader.readline()).decode().strip()) != "data: [DONE]":
            if line.startswith("data: "):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
        await self.close()
        return "".join(texts), len(texts)

    async def close(self) -> None:
        self._writer.transport.abort()
        await asyncio.wait([asyncio.ensure_future(self._writer.wait_closed())])
