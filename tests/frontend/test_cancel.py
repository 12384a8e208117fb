"""Cancelling a generation from this side, at every stage of its life."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from streamserve.frontend.client import Generation
from streamserve.frontend.mailbox import Delta
from streamserve.messages import Finish
from streamserve.sampling import SamplingParams

LENGTH = int(Finish.LENGTH)


def generation(num_prompt: int = 4, max_tokens: int = 3) -> Generation:
    return Generation(np.full(num_prompt, 7, dtype=np.int32), SamplingParams(max_tokens=max_tokens))


async def collect(client: Any, wanted: Generation) -> list[int]:
    tokens: list[int] = []
    async with aclosing(client.generate(wanted)) as deltas:
        async for delta in deltas:
            tokens += delta.tokens
    return tokens


async def test_cancelling_ends_the_stream_at_once_and_the_text_stands(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    wanted = generation(max_tokens=100)
    deltas = frontend.client.generate(wanted)
    first = asyncio.ensure_future(anext(deltas))
    await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
    stream = frontend.engine.adds[0].stream
    frontend.engine.step()
    assert (await first).tokens == [7]
    frontend.engine.step()
    await frontend.until(lambda: frontend.streams.find(stream)._tokens)
    wanted.cancel()
    wanted.cancel()
    # The engine hears of it although nobody has looked at the stream yet.
    await frontend.engine.until(lambda: bool(frontend.engine.aborts))
    # What it had sent by then is for nobody.
    frontend.engine.push_step([stream], [1], [0], [7])
    assert await frontend.client.call({"method": "ping"})
    assert await anext(deltas) == Delta([7], Finish.ABORT)
    with pytest.raises(StopAsyncIteration):
        await anext(deltas)
    assert frontend.engine.aborts == [stream]
    assert frontend.client.num_live == 0
    wanted.cancel()


async def test_cancelling_what_waits_in_the_queue(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    wanted = generation()
    running = asyncio.ensure_future(collect(frontend.client, wanted))
    await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
    wanted.cancel()
    assert await running == []
    await frontend.engine.until(lambda: bool(frontend.engine.aborts))
    assert frontend.client.admission.waiting == 0


async def test_cancelling_before_the_engine_has_heard_of_it(run_harness: Any) -> None:
    async with run_harness(ring_capacity=1 << 13) as frontend:
        frontend.engine.is_automatic = False
        half = asyncio.ensure_future(collect(frontend.client, generation(20_000)))
        wanted = generation()
        unsent = asyncio.ensure_future(collect(frontend.client, wanted))
        await frontend.until(lambda: frontend.sender.num_queued == 2)
        wanted.cancel()
        assert await unsent == []
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        assert await frontend.client.call({"method": "ping"})
        assert frontend.engine.aborts == []
        frontend.engine.is_automatic = True
        frontend.engine_bell.ring()
        assert len(await half) == 3


async def test_cancelled_before_it_began_it_never_does(frontend: Any) -> None:
    wanted = generation()
    wanted.cancel()
    deltas = [delta async for delta in frontend.client.generate(wanted)]
    assert deltas == [Delta([], Finish.ABORT)]
    assert await frontend.client.call({"method": "ping"})
    assert frontend.engine.adds == []


async def test_cancelling_after_the_end_changes_nothing(frontend: Any) -> None:
    wanted = generation()
    assert len(await collect(frontend.client, wanted)) == 3
    wanted.cancel()
    assert await frontend.client.call({"method": "ping"})
    assert frontend.engine.aborts == []


async def test_cancelling_when_the_finish_is_there_but_not_looked_at(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    wanted = generation(max_tokens=2)
    deltas = frontend.client.generate(wanted)
    first = asyncio.ensure_future(anext(deltas))
    await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
    frontend.engine.step()
    await first
    frontend.engine.step()
    await frontend.until(lambda: frontend.streams.find(frontend.engine.adds[0].stream).finish)
    wanted.cancel()
    assert await anext(deltas) == Delta([7], LENGTH)
    await deltas.aclose()
    assert frontend.engine.aborts == []
