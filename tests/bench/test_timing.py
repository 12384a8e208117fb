"""Known moments in, known figures out: through a real connection, under a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from bench.scripted_stream import (
    DONE,
    OK,
    Answer,
    ScriptedClock,
    ScriptedStream,
    completion,
    event,
    scripted_server,
    usage,
)

from streamserve.bench.connection import ConnectionPool
from streamserve.bench.datasets import Sample
from streamserve.bench.http import Address
from streamserve.bench.run import Form, Sender
from streamserve.bench.timing import Outcome, StreamTimer

SAMPLE = Sample("Once", 1, 4)


@asynccontextmanager
async def sender_to(answer: Answer, clock: ScriptedClock, is_chat: bool = False) -> AsyncIterator[Sender]:
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    async with (
        scripted_server(answer) as url,
        ConnectionPool(Address.of(url, path), {}, clock) as pool,
    ):
        yield Sender(pool, Form(is_chat, "tiny", {}), clock, "bench-")


async def ask(answer: Answer, clock: ScriptedClock, is_chat: bool = False) -> Outcome:
    async with sender_to(answer, clock, is_chat) as sender:
        return await sender.ask(SAMPLE, 7)


async def test_times_are_those_at_which_the_bytes_came() -> None:
    clock = ScriptedClock()

    async def answer(stream: ScriptedStream) -> None:
        assert stream.head.startswith("POST /v1/completions HTTP/1.1\r\n")
        assert "X-Request-Id: bench-7\r\n" in stream.head
        assert stream.body == {
            "model": "tiny",
            "prompt": "Once",
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        await clock.at(100.5, lambda: stream.send(completion("a"), OK))
        await clock.at(100.75, lambda: stream.send(completion("b")))
        await clock.at(101.75, lambda: stream.send(completion("c") + completion("d")))
        await clock.at(109.0, lambda: stream.end(usage(11, 5) + DONE))

    outcome = await ask(answer, clock)
    assert outcome == Outcome(
        prompt_len=11,
        start_time=100.0,
        ttft=0.5,
        itl=[0.25, 1.0, 0.0],
        latency=1.75,
        output_tokens=5,
        text="abcd",
    )
    assert outcome.tpot == pytest.approx(1.25 / 4)


async def test_an_event_counts_when_its_last_byte_has_come() -> None:
    clock = ScriptedClock()
    first = completion("a")

    async def answer(stream: ScriptedStream) -> None:
        await clock.at(101.0, lambda: stream.send(first[:20], OK))
        await clock.at(102.0, lambda: stream.send(first[20:]))
        await clock.at(103.0, lambda: stream.end(usage(1, 1) + DONE))

    outcome = await ask(answer, clock)
    assert (outcome.ttft, outcome.itl, outcome.latency) == (2.0, [], 2.0)


async def test_a_chat_counts_the_chunk_with_the_role() -> None:
    clock = ScriptedClock()

    def delta(**members: str) -> str:
        return event({"choices": [{"index": 0, "delta": members}]})

    async def answer(stream: ScriptedStream) -> None:
        assert stream.body["messages"] == [{"role": "user", "content": "Once"}]
        assert stream.body["max_completion_tokens"] == 4
        await clock.at(101.0, lambda: stream.send(": ping\n\n" + delta(role="assistant", content=""), OK))
        await clock.at(103.0, lambda: stream.send(delta(content="x")))
        await clock.at(104.0, lambda: stream.end(delta() + usage(1, 1) + DONE))

    outcome = await ask(answer, clock, is_chat=True)
    assert (outcome.ttft, outcome.itl, outcome.latency, outcome.text) == (1.0, [2.0, 1.0], 4.0, "x")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (completion("a"), "broke off before [DONE]"),
        (DONE, "no chunk with a choice"),
        (completion("a") + event({"error": {"message": "The engine died."}}), "The engine died."),
        (completion("a") + "data: nonsense\n\n" + DONE, "no chunk: 'nonsense'"),
        ("data: [1]\n\n" + DONE, "no chunk: '[1]'"),
    ],
)
def test_a_stream_that_is_not_whole_has_failed(data: str, problem: str) -> None:
    outcome = Outcome(1, start_time=1.0)
    timer = StreamTimer(outcome)
    timer.feed(2.0, data.encode())
    timer.finish()
    assert problem in outcome.error
    assert not outcome.is_success


def test_without_usage_chunks_are_counted() -> None:
    outcome = Outcome(1)
    timer = StreamTimer(outcome)
    timer.feed(2.0, (completion("a") + completion("b") + DONE).encode())
    timer.finish()
    assert (outcome.output_tokens, outcome.prompt_len, outcome.error) == (2, 1, "")


async def test_a_refusal_says_why() -> None:
    async def answer(stream: ScriptedStream) -> None:
        body = b'{"error": {"message": "Too many."}}'
        stream.writer.write(b"HTTP/1.1 429 No\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    assert (await ask(answer, ScriptedClock())).error == "HTTP 429: Too many."


async def test_a_lost_connection_is_a_failure() -> None:
    async def answer(stream: ScriptedStream) -> None:
        stream.send(completion("a"), OK)
        await stream.writer.drain()
        stream.writer.close()

    assert "closed the connection" in (await ask(answer, ScriptedClock())).error


async def test_nobody_listens() -> None:
    clock = ScriptedClock()
    async with ConnectionPool(Address.of("http://127.0.0.1:1", "/"), {}, clock) as pool:
        outcome = await Sender(pool, Form(False, "tiny", {}), clock).ask(SAMPLE, 0)
    assert not outcome.is_success


async def test_a_connection_is_used_again_and_one_that_the_server_closed_is_replaced() -> None:
    writers = []

    async def answer(stream: ScriptedStream) -> None:
        writers.append(stream.writer)
        stream.send(completion("a"), OK)
        stream.end(DONE)
        await stream.writer.drain()
        if len(writers) == 2:
            stream.writer.close()

    async with sender_to(answer, ScriptedClock()) as sender:
        outcomes = [await sender.ask(SAMPLE, number) for number in range(3)]
    assert [outcome.error for outcome in outcomes] == ["", "", ""]
    assert writers[0] is writers[1] is not writers[2]
