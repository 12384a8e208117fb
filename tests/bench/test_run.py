from __future__ import annotations

import asyncio

import pytest
from bench.scripted_stream import DONE, OK, ScriptedClock, ScriptedStream, completion, scripted_server

from streamserve.bench.connection import ConnectionPool
from streamserve.bench.datasets import Sample
from streamserve.bench.http import Address
from streamserve.bench.run import Form, Sender, run, wait_ready

SAMPLES = [Sample(f"prompt {number}", 1, 1) for number in range(4)]


async def test_requests_leave_at_their_times() -> None:
    clock = ScriptedClock()
    slept = []
    ended = []

    async def sleep(seconds: float) -> None:
        # The request before leaves first.
        await asyncio.sleep(0)
        slept.append(seconds)
        clock.now += seconds

    async def answer(stream: ScriptedStream) -> None:
        stream.send(completion("a"), OK)
        stream.end(DONE)

    async with scripted_server(answer) as url, ConnectionPool(Address.of(url, "/"), {}, clock) as pool:
        sender = Sender(pool, Form(False, "tiny", {}), clock)
        times = [0.0, 0.5, 0.5, 2.0]
        outcomes, _ = await run(sender, SAMPLES, times, None, on_end=ended.append, sleep=sleep)
    assert slept == [0.5, 1.5]
    assert [outcome.start_time for outcome in outcomes] == [100.0, 100.5, 100.5, 102.0]
    assert [outcome.error for outcome in outcomes] == [""] * 4
    assert ended == outcomes


async def test_a_limit_makes_requests_wait_and_says_how_long() -> None:
    clock = ScriptedClock()
    num_open = most_open = 0

    async def answer(stream: ScriptedStream) -> None:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        await clock.at(clock.now + 1.0, lambda: stream.send(completion("a"), OK))
        num_open -= 1
        stream.end(DONE)

    async with scripted_server(answer) as url, ConnectionPool(Address.of(url, "/"), {}, clock) as pool:
        sender = Sender(pool, Form(False, "tiny", {}), clock)
        outcomes, duration_s = await run(sender, SAMPLES, [0.0] * 4, 1, on_end=lambda _: None)
    assert most_open == 1
    assert [outcome.queue_time for outcome in outcomes] == [0.0, 1.0, 2.0, 3.0]
    assert [outcome.ttft for outcome in outcomes] == [1.0] * 4
    assert duration_s == 4.0


@pytest.mark.parametrize(("timeout_s", "problem"), [(10.0, ""), (1.0, "HTTP 503: loading")])
async def test_wait_ready_asks_until_there_is_an_answer(timeout_s: float, problem: str) -> None:
    clock = ScriptedClock()
    num_asked = 0

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    async def answer(stream: ScriptedStream) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 4:
            stream.writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 7\r\n\r\nloading")
        else:
            stream.send(completion("a"), OK)
            stream.end(DONE)

    async with scripted_server(answer) as url, ConnectionPool(Address.of(url, "/"), {}, clock) as pool:
        sender = Sender(pool, Form(False, "tiny", {}), clock)
        assert await wait_ready(sender, SAMPLES[0], timeout_s, sleep) == problem
