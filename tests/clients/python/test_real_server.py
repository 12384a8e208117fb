"""Both clients and both transports against a real server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from contextlib import aclosing

import httpx
import pytest
from cutting_proxy import CuttingProxy
from server import ROOT, running_server, wait_idle, wait_until

from streamserve_client import (
    AsyncClient,
    AuthenticationFailed,
    BadRequest,
    Client,
    NotFound,
    StreamInterrupted,
    text_of,
)

MESSAGES = [{"role": "user", "content": "Tell me about rivers."}]
# What each endpoint is asked, and the fields that make the answer the same each time.
ASKED = {
    "chat": (MESSAGES, {"max_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
    "completions": ("Once", {"max_tokens": 20, "temperature": 0, "logprobs": 2, "n": 2}),
    "responses": ("Tell me about rivers.", {"max_output_tokens": 20, "temperature": 0}),
}
LONG = {"max_tokens": 20_000, "ignore_eos": True}
README = (ROOT / "clients" / "python" / "README.md").read_text(encoding="utf-8")


@pytest.fixture(params=["sse", "websocket"])
def transport(request):
    return request.param


def num_running(server):
    metrics = httpx.get(f"{server.url}/metrics", timeout=300).text
    return sum(map(float, re.findall(r"^vllm:num_requests_running\S* (\S+)$", metrics, re.MULTILINE)))


def wait_stopped(server):
    """The generation is over, as /metrics and the engine itself have it."""
    wait_until(lambda: num_running(server) == 0, "nothing runs")
    wait_idle(server)


def comparable(document):
    """Without what differs from one request to the next."""
    passing = ("id", "created", "created_at", "completed_at")
    if isinstance(document, dict):
        return {name: comparable(value) for name, value in document.items() if name not in passing}
    if isinstance(document, float):
        # The last bits of log probabilities depend on the company.
        return "a number"
    return [comparable(value) for value in document] if isinstance(document, list) else document


@pytest.mark.parametrize("endpoint", ASKED)
async def test_a_stream_adds_up_to_what_comes_in_one_piece(make_client, tiny_server, transport, endpoint):
    prompt, options = ASKED[endpoint]
    client = make_client(url=tiny_server.url, transport=transport)
    whole = await client.create(endpoint, prompt, **options)
    reading = await client.read(endpoint, prompt, **options)
    assert len(reading.chunks) > 1
    assert reading.text == text_of(whole) == text_of(reading.result) != ""
    if endpoint != "responses":
        whole["usage"]["prompt_tokens_details"] = reading.result["usage"]["prompt_tokens_details"] = {}
    else:
        whole["usage"]["input_tokens_details"] = reading.result["usage"]["input_tokens_details"] = {}
    assert comparable(reading.result) == comparable(whole)


@pytest.mark.parametrize("endpoint", ASKED)
async def test_lost_connections_lose_nothing(make_client, tiny_server, transport, endpoint):
    prompt, options = ASKED[endpoint]
    straight = make_client(url=tiny_server.url, transport=transport)
    whole = await straight.read(endpoint, prompt, **options)
    # Enough for the head of an answer and one event, of which the first of a response are the largest.
    limits = [(2500 if endpoint == "responses" else 1000) + 37 * number for number in range(8)]
    with CuttingProxy(tiny_server.url, iter(limits)) as proxy:
        client = make_client(url=proxy.url, transport=transport)
        reading = await client.read(endpoint, prompt, **options)
        await client.close()
        assert proxy.num_connections > 2
    assert reading.text == whole.text
    for result in (whole.result, reading.result):
        result["usage"].pop("input_tokens_details" if endpoint == "responses" else "prompt_tokens_details")
    assert comparable(reading.result) == comparable(whole.result)


async def test_a_request_whose_answer_never_came_is_not_run_twice(make_client, tiny_server):
    def num_run():
        metrics = httpx.get(f"{tiny_server.url}/metrics", timeout=300).text
        return sum(map(float, re.findall(r"^vllm:request_success_total\S* (\S+)$", metrics, re.MULTILINE)))

    prompt, options = ASKED["completions"]
    whole = await make_client(url=tiny_server.url).read("completions", prompt, **options)
    before = num_run()
    with CuttingProxy(tiny_server.url, iter([1, 1, 1])) as proxy:
        client = make_client(url=proxy.url)
        reading = await client.read("completions", prompt, **options)
        await client.close()
    assert reading.text == whole.text
    # One of each choice.
    assert num_run() - before == options["n"]


async def test_a_stream_that_is_left_while_the_way_is_cut_ends(tiny_server):
    """Over SSE; on a WebSocket the word may be lost with the connection, and the server's window ends it."""
    with CuttingProxy(tiny_server.url, iter(())) as proxy:
        async with AsyncClient(proxy.url) as client:
            async with client.completions.stream("Once", **LONG) as stream:
                await anext(stream)
                proxy.cut()
            await asyncio.to_thread(wait_stopped, tiny_server)


async def test_leaving_a_stream_stops_its_generation(make_client, tiny_server, transport):
    client = make_client(url=tiny_server.url, transport=transport)
    reading = await client.read("completions", "Once", limit=3, **LONG)
    assert len(reading.chunks) == 3
    await asyncio.to_thread(wait_stopped, tiny_server)


async def test_closing_the_client_stops_its_streams(tiny_server, transport):
    client = AsyncClient(tiny_server.url, transport=transport)
    stream = client.completions.stream("Once", **LONG)
    await anext(stream)
    await client.close()
    await asyncio.to_thread(wait_stopped, tiny_server)
    assert text_of(await stream.result())


def test_closing_the_blocking_client_stops_its_streams(tiny_server, transport):
    client = Client(tiny_server.url, transport=transport)
    stream = client.completions.stream("Once", **LONG)
    next(stream)
    client.close()
    wait_stopped(tiny_server)
    assert stream.text


def test_a_break_without_a_context_stops_it_too(tiny_server, transport):
    with Client(tiny_server.url, transport=transport) as client:
        for _ in client.completions.stream("Once", **LONG):
            assert num_running(tiny_server) == 1
            break
        wait_stopped(tiny_server)


async def test_an_asyncio_break_without_a_context_stops_it_too(tiny_server, transport):
    async with AsyncClient(tiny_server.url, transport=transport) as client:
        async for _ in client.completions.stream("Once", **LONG):
            break
        await asyncio.to_thread(wait_stopped, tiny_server)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_cancelling_the_task_stops_it(tiny_server, transport, is_stream):
    async with AsyncClient(tiny_server.url, transport=transport) as client:

        async def ask():
            if not is_stream:
                await client.completions.create("Once", **LONG)
            async with client.completions.stream("Once", **LONG) as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(ask())
        await asyncio.to_thread(wait_until, lambda: num_running(tiny_server) == 1, "it runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_stopped, tiny_server)


def test_another_thread_ends_an_answer_by_its_id(tiny_server, transport):
    with Client(tiny_server.url, transport=transport) as client:
        stream = client.completions.stream("Once", **LONG)
        answer_id = next(stream)["id"]
        thread = threading.Thread(target=client.cancel, args=(answer_id,))
        thread.start()
        assert stream.result()["choices"][0]["finish_reason"] == "abort"
        thread.join()
        wait_stopped(tiny_server)
        with pytest.raises(NotFound):
            client.cancel(answer_id)


def test_threads_share_a_client(tiny_server, transport):
    texts = {}

    def ask(number):
        with client.completions.stream(f"Number {number % 4}", max_tokens=30, temperature=0) as stream:
            texts[number] = "".join(stream.texts())

    with Client(tiny_server.url, transport=transport) as client:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(texts) == 16
    assert all(texts[number] == texts[number % 4] != "" for number in texts)


async def test_many_streams_of_one_client(tiny_server, transport):
    async with AsyncClient(tiny_server.url, transport=transport) as client:

        async def ask(number):
            stream = client.completions.stream(f"Number {number % 4}", max_tokens=30, temperature=0)
            async with aclosing(stream.texts()) as texts:
                return "".join([text async for text in texts])

        texts = await asyncio.gather(*(ask(number) for number in range(32)))
    assert texts[4:] == texts[:4] * 7


async def test_refusals_name_the_field(make_client, tiny_server, transport):
    client = make_client(url=tiny_server.url, transport=transport)
    for is_stream in (False, True):
        ask = client.read if is_stream else client.create
        with pytest.raises(BadRequest) as raised:
            await ask("chat", MESSAGES, temperature=9)
        assert (raised.value.status, raised.value.param) == (400, "temperature")
        with pytest.raises(NotFound):
            await ask("completions", "Once", model="other")
    assert client.delays == []


async def test_a_request_over_the_limit(make_client, tiny_server):
    client = make_client(url=tiny_server.url)
    with pytest.raises(BadRequest) as raised:
        await client.create("completions", "x" * 3_000_000)
    assert (raised.value.status, raised.value.code) == (413, "body_too_large")
    assert client.delays == []


@pytest.fixture(scope="module")
def keyed_server(tiny_model):
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--max-waiting=1",
        "--max-num-seqs=1",
        env={"OMP_NUM_THREADS": "2", "STREAMSERVE_API_KEY": "sesame"},
    ) as server:
        yield server


async def test_a_key(make_client, keyed_server, transport):
    client = make_client(url=keyed_server.url, transport=transport, api_key="sesame")
    assert text_of(await client.create("completions", "Once", max_tokens=3))
    for key in (None, "wrong"):
        stranger = make_client(url=keyed_server.url, transport=transport, api_key=key)
        with pytest.raises(AuthenticationFailed) as raised:
            await stranger.read("completions", "Once")
        assert raised.value.code == "invalid_api_key"
        assert stranger.delays == []


async def test_a_busy_server_is_asked_again_when_it_says(make_client, keyed_server, transport):
    """One runs, one waits, and the third is turned away until its client has come back often enough."""
    url, key = keyed_server.url, "sesame"
    async with AsyncClient(url, api_key=key) as busy:
        first, second = (busy.completions.stream("Once", **LONG) for _ in range(2))
        async with first, second:
            await anext(first)
            waiting = asyncio.create_task(anext(second))
            headers = {"Authorization": f"Bearer {key}"}

            def is_full():
                return httpx.get(f"{url}/load", headers=headers, timeout=300).json()["waiting"] == 1

            await asyncio.to_thread(wait_until, is_full, "the queue is full")
            client = make_client(url=url, transport=transport, api_key=key)

            async def ask():
                return await client.create("completions", "Twice", max_tokens=3)

            with pytest.raises(Exception, match="overloaded") as raised:
                await ask()
            assert raised.value.status == 429
            assert len(client.delays) == 5
            assert min(client.delays) > 1
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    assert text_of(await ask())


async def test_a_frontend_that_is_killed_interrupts_the_stream(keyed_server, transport):
    async with AsyncClient(keyed_server.url, api_key="sesame", transport=transport) as client:
        stream = client.completions.stream("Once", **LONG)
        first = await anext(stream)
        keyed_server.frontend.kill()
        with pytest.raises(StreamInterrupted) as raised:
            async for _ in stream:
                pass
        assert raised.value.partial_text == stream.text == text_of(raised.value.partial_answer)
        assert raised.value.partial_answer["id"] == first["id"]
        # The next one goes to the process in its place.
        assert text_of(await client.completions.create("Once", max_tokens=3))


@pytest.mark.parametrize("program", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_examples_of_the_readme(tiny_server, program):
    program = program.replace("http://127.0.0.1:8000", tiny_server.url)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "clients" / "python" / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.strip()
