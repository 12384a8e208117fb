"""The frontend's side of the rings: large messages, a full ring, order, and how streams end."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamserve.errors import EngineUnavailable, Expired, RequestFailed
from streamserve.frontend import pump
from streamserve.frontend.client import Generation
from streamserve.frontend.sender import MAX_ABORTS_PER_FRAME, Sender
from streamserve.ipc.layout import TAIL_WORD
from streamserve.messages import AddRequest, Buffer, Finish, Kind, decode_abort, decode_add
from streamserve.sampling import SamplingParams


def generation(num_prompt: int = 4, max_tokens: int = 3) -> Generation:
    return Generation(np.full(num_prompt, 7, dtype=np.int32), SamplingParams(max_tokens=max_tokens))


async def collect(client: Any, wanted: Generation) -> list[int]:
    tokens: list[int] = []
    async with aclosing(client.generate(wanted)) as deltas:
        async for delta in deltas:
            tokens += delta.tokens
    return tokens


# Through real rings


async def test_a_prompt_larger_than_the_ring_does_not_wedge_it(run_harness: Any) -> None:
    async with run_harness(ring_capacity=1 << 13) as frontend, asyncio.TaskGroup() as group:
        large = group.create_task(collect(frontend.client, generation(20_000)))
        small = [group.create_task(collect(frontend.client, generation())) for _ in range(64)]
        huge = group.create_task(collect(frontend.client, generation(50_000)))
    assert [len(task.result()) for task in (large, *small, huge)] == [3] * 66
    sizes = [len(add.tokens) for add in frontend.engine.adds]
    assert sizes == [20_000] + [4] * 64 + [50_000]
    assert frontend.sender.num_queued == 0


async def test_leaving_while_the_request_is_half_sent(run_harness: Any) -> None:
    async with run_harness(ring_capacity=1 << 13) as frontend:
        frontend.engine.is_automatic = False
        half = asyncio.ensure_future(collect(frontend.client, generation(20_000)))
        unsent = asyncio.ensure_future(collect(frontend.client, generation(30_000)))
        await frontend.until(lambda: frontend.sender.num_queued == 2)
        for task in (half, unsent):
            task.cancel()
        await asyncio.wait([half, unsent])
        await frontend.engine.until(lambda: bool(frontend.engine.aborts))
        # The one that had not begun to leave never does.
        assert [len(add.tokens) for add in frontend.engine.adds] == [20_000]
        assert frontend.engine.aborts == [frontend.engine.adds[0].stream]
        frontend.engine.is_automatic = True
        assert len(await collect(frontend.client, generation())) == 3


async def test_what_was_meant_for_a_process_before_this_one_is_not_heeded(run_harness: Any) -> None:
    async with run_harness(says_hello=False) as frontend:
        engine, first_stream = frontend.engine, 1 << 32
        engine.hello(incarnation=7)
        engine.push_step([first_stream], [1], [Finish.NONE], [9])
        await frontend.until(lambda: frontend.pump.statistics().messages == 2)
        assert frontend.pump.engine is None
        engine.push_step([first_stream], [1], [Finish.STOP], [9])
        engine.hello(incarnation=0)
        await frontend.until(lambda: frontend.pump.engine is not None)
        assert await collect(frontend.client, generation()) == [7, 7, 7]
        assert engine.adds[0].stream == first_stream


async def test_closing_the_iterator_is_the_abort(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    deltas = frontend.client.generate(generation(max_tokens=100))
    first = asyncio.ensure_future(anext(deltas))
    await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
    frontend.engine.step()
    assert (await first).tokens == [7]
    assert frontend.client.num_live == 1
    await deltas.aclose()
    await deltas.aclose()
    assert frontend.client.num_live == 0
    await frontend.engine.until(lambda: bool(frontend.engine.aborts))
    assert frontend.engine.aborts == [frontend.engine.adds[0].stream]


async def test_a_finish_that_nobody_has_looked_at_yet_needs_no_abort(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    deltas = frontend.client.generate(generation(max_tokens=2))
    first = asyncio.ensure_future(anext(deltas))
    await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
    frontend.engine.step()
    await first
    frontend.engine.step()
    await frontend.until(lambda: frontend.streams.find(frontend.engine.adds[0].stream).finish)
    await deltas.aclose()
    assert frontend.sender.num_queued == 0
    assert await frontend.client.call({"method": "ping"})
    assert frontend.engine.aborts == []


async def test_tokens_in_the_box_come_before_the_failure(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    deltas = frontend.client.generate(generation(max_tokens=9))
    first = asyncio.ensure_future(anext(deltas))
    await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
    frontend.engine.step()
    await first
    frontend.engine.step()
    frontend.engine.die(frontend.frontend_bell)
    await frontend.until(lambda: frontend.pump.engine is None)
    assert (await anext(deltas)).tokens == [7]
    with pytest.raises(EngineUnavailable):
        await anext(deltas)


async def test_an_engine_error_fails_the_one_request(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    async with asyncio.TaskGroup() as group:
        good = group.create_task(collect(frontend.client, generation()))
        bad = group.create_task(asyncio.wait([asyncio.ensure_future(collect(frontend.client, generation()))]))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 2)
        frontend.engine.finish(frontend.engine.adds[1].stream, Finish.ERROR)
        while frontend.engine.step():
            pass
    (failed,), _ = bad.result()
    assert isinstance(failed.exception(), RequestFailed)
    assert len(good.result()) == 3


async def test_a_request_that_waited_too_long_has_expired(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    wanted = generation()
    wanted.deadline_ns = 7
    late = asyncio.ensure_future(collect(frontend.client, wanted))
    await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
    assert frontend.engine.adds[0].deadline_ns == 7
    frontend.engine.finish(frontend.engine.adds[0].stream, Finish.EXPIRED)
    with pytest.raises(Expired, match="time in the queue") as expired:
        await late
    assert expired.value.retry_after_s >= 1
    assert await frontend.client.call({"method": "ping"})
    assert frontend.engine.aborts == []


async def test_what_a_request_is_charged_to_goes_along(frontend: Any) -> None:
    wanted = Generation(np.full(4, 7, dtype=np.int32), SamplingParams(3), (), 2, 9, "somebody", "salt")
    frontend.engine.is_automatic = False
    running = asyncio.ensure_future(collect(frontend.client, wanted))
    await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
    (request,) = frontend.engine.adds
    assert (request.priority, request.deadline_ns) == (2, 9)
    assert (request.tenant, request.cache_salt) == ("somebody", "salt")
    while frontend.engine.step():
        pass
    await running


async def test_a_draining_client_accepts_nothing_and_finishes_what_runs(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    async with asyncio.TaskGroup() as group:
        running = group.create_task(collect(frontend.client, generation()))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        frontend.client.drain()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await collect(frontend.client, generation())
        while frontend.engine.step():
            pass
    assert len(running.result()) == 3
    assert not frontend.client.is_healthy


# Sender alone, on a ring of paper


class PaperWriter:
    """Takes `room` messages; a long one needs two goes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.max_message = 2000
        self.sent: list[tuple[int, bytes]] = []
        self.is_armed = False

    def try_push(self, kind: int, parts: Sequence[Buffer]) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.sent.append((kind, b"".join(parts)))
        return True

    def begin(self, kind: int, parts: Sequence[Buffer]) -> PaperFragments:
        return PaperFragments(self, kind, b"".join(parts))

    def arm_space(self) -> bool:
        self.is_armed = True
        return self.room == 0

    def disarm_space(self) -> None:
        self.is_armed = False

    def statistics(self) -> Any:
        raise NotImplementedError


class PaperFragments:
    def __init__(self, writer: PaperWriter, kind: int, payload: bytes) -> None:
        self.writer, self.kind, self.payload = writer, kind, payload
        self.left = 2

    def advance(self) -> bool:
        while self.left and self.writer.room:
            self.writer.room -= 1
            self.left -= 1
        if not self.left:
            self.writer.sent.append((self.kind, self.payload))
        return not self.left


def add(stream: int, num_prompt: int = 2) -> AddRequest:
    return AddRequest(stream, np.zeros(num_prompt, "<i4"), num_prompt, SamplingParams(1), [])


def sent(writer: PaperWriter) -> list[Any]:
    return [
        decode_add(memoryview(data)).stream if kind == Kind.ADD else decode_abort(memoryview(data))
        for kind, data in writer.sent
    ]


def test_aborts_overtake_requests_that_wait_and_take_back_those_of_their_own() -> None:
    writer = PaperWriter(room=1)
    sender = Sender(writer)
    for stream in (1, 2, 3, 4):
        sender.add(add(stream))
    assert writer.is_armed
    sender.abort(3)
    sender.abort(1)
    writer.room = 10
    sender.flush()
    assert sent(writer) == [1, [1], 2, 4]
    assert sender.num_queued == 0
    assert not writer.is_armed


def test_an_abort_waits_for_its_own_request_that_is_half_sent() -> None:
    writer = PaperWriter(room=1)
    sender = Sender(writer)
    sender.add(add(1, num_prompt=1000))
    sender.add(add(2))
    sender.abort(1)
    assert sent(writer) == []
    writer.room = 10
    sender.flush()
    assert sent(writer) == [1, [1], 2]


def test_many_aborts_go_in_several_frames() -> None:
    writer = PaperWriter(room=0)
    sender = Sender(writer)
    for stream in range(MAX_ABORTS_PER_FRAME + 1):
        sender.abort(stream)
    writer.room = 10
    sender.flush()
    assert [len(streams) for streams in sent(writer)] == [MAX_ABORTS_PER_FRAME, 1]


def test_a_long_call_goes_in_fragments() -> None:
    writer = PaperWriter(room=1)
    sender = Sender(writer)
    sender.call([b"x" * 3000])
    sender.abort(1)
    writer.room = 10
    sender.flush()
    assert [kind for kind, _ in writer.sent] == [Kind.CALL, Kind.ABORT]


def test_a_request_that_cannot_be_encoded_is_not_in_the_way_of_others() -> None:
    writer = PaperWriter(room=10)
    sender = Sender(writer)
    with pytest.raises(struct.error):
        sender.add(replace(add(1), priority=2**40))
    sender.add(add(2))
    assert sent(writer) == [2]


def test_a_new_engine_gets_nothing_of_the_old_ones() -> None:
    writer = PaperWriter(room=0)
    sender = Sender(writer)
    sender.add(add(1))
    sender.abort(9)
    sender.call([b"x"])
    sender.reset(2)
    writer.room = 10
    sender.flush()
    assert sent(writer) == []


async def test_a_damaged_frame_costs_no_other_frame(run_harness: Any) -> None:
    async with run_harness() as frontend:
        epoch = struct.pack("<I", frontend.engine.epoch)
        assert frontend.engine.writer.try_push(Kind.STATS, [epoch, b"{not json"])
        assert await frontend.client.call({"method": "ping"})


async def test_streams_end_when_a_step_cannot_be_read(run_harness: Any) -> None:
    """Whose tokens it held is not known, so no stream may go on as if it had them all."""
    async with run_harness() as frontend:
        frontend.engine.is_automatic = False
        deltas = frontend.client.generate(generation(max_tokens=100))
        first = asyncio.ensure_future(anext(deltas))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        epoch = struct.pack("<I", frontend.engine.epoch)
        assert frontend.engine.writer.try_push(Kind.STEP, [epoch, struct.pack("<IIIQ", 9, 9, 0, 1)])
        with pytest.raises(RequestFailed):
            await first
        await frontend.engine.until(lambda: bool(frontend.engine.aborts))


async def test_a_damaged_ring_ends_the_streams_and_then_the_process(
    run_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    exited = asyncio.Event()
    monkeypatch.setattr(pump, "LAST_WORDS_S", 0)
    monkeypatch.setattr(pump.sys, "exit", lambda code: (codes.append(code), exited.set()))
    async with run_harness() as frontend:
        frontend.engine.is_automatic = False
        deltas = frontend.client.generate(generation(max_tokens=100))
        first = asyncio.ensure_future(anext(deltas))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        # A kind that no writer can send.
        frontend.engine.writer._pack(frontend.engine.writer._data, frontend.engine.writer._at, 8, 0, b"")
        frontend.engine.writer._words[TAIL_WORD] += 16
        with pytest.raises(EngineUnavailable):
            await first
        await exited.wait()
    assert codes == [1]
