"""What a frontend does when its engine dies: clients see a pause, and nothing else."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamserve.errors import EngineUnavailable, Expired, RequestFailed
from streamserve.frontend.client import Generation
from streamserve.ipc.board import EngineState
from streamserve.messages import PROBATION_TOKENS, Finish, Kind
from streamserve.sampling import SamplingParams

PROMPT = [7, 8, 9]


def generation(num_prompt: int = 3, max_tokens: int = 20, **rest: Any) -> Generation:
    tokens = np.array((PROMPT * num_prompt)[:num_prompt], dtype=np.int32)
    return Generation(tokens, SamplingParams(max_tokens=max_tokens), **rest)


def output(num_tokens: int) -> list[int]:
    """What the fake engine says to `generation()`."""
    return (PROMPT * num_tokens)[:num_tokens]


async def collect(client: Any, wanted: Generation) -> list[int]:
    tokens: list[int] = []
    async with aclosing(client.generate(wanted)) as deltas:
        async for delta in deltas:
            tokens += delta.tokens
    return tokens


@pytest.fixture
async def slow(run_harness: Any) -> Any:
    """A frontend whose engine steps when it is told to."""
    async with run_harness() as frontend:
        frontend.engine.is_automatic = False
        await frontend.until(lambda: frontend.pump.engine is not None)
        yield frontend


async def ask(frontend: Any, wanted: Generation) -> asyncio.Task[list[int]]:
    """A request that the engine has."""
    number = len(frontend.engine.adds) + 1
    task = asyncio.create_task(collect(frontend.client, wanted))
    await frontend.engine.until(lambda: len(frontend.engine.adds) == number)
    return task


async def crash(frontend: Any) -> None:
    """The engine dies, and the frontend knows."""
    frontend.engine.crash(frontend.frontend_bell)
    await frontend.until(lambda: frontend.pump.engine is None)


async def succeed(frontend: Any, num_requests: int) -> list[Any]:
    """Another is there; what it is given."""
    frontend.engine.succeed()
    await frontend.engine.until(lambda: len(frontend.engine.adds) == num_requests)
    return list(frontend.engine.adds)


def finish(frontend: Any) -> None:
    while frontend.engine.step():
        pass


async def test_all_go_on_in_their_order_with_what_they_have(slow: Any) -> None:
    slow.engine.max_running = 2
    tasks = [await ask(slow, generation(tenant=name)) for name in ("a", "b", "c", "d")]
    for _ in range(5):
        slow.engine.step()
    await crash(slow)
    adds = await succeed(slow, 4)
    assert [add.tenant for add in adds] == ["a", "b", "c", "d"]
    assert [add.tokens.tolist() for add in adds] == [PROMPT + output(5)] * 2 + [PROMPT] * 2
    assert [add.num_prompt for add in adds] == [3] * 4
    assert [add.has_run for add in adds] == [True, True, False, False]
    assert not any(add.is_suspect for add in adds)
    assert {add.params.max_tokens for add in adds} == {20}
    finish(slow)
    assert await asyncio.gather(*tasks) == [output(20)] * 4


async def test_what_the_dead_one_sent_last_counts(slow: Any) -> None:
    task = await ask(slow, generation())
    slow.engine.step()
    # The frontend has no turn between these: all of it is found in the ring.
    for _ in range(3):
        slow.engine.step()
    slow.engine.crash(slow.frontend_bell)
    slow.engine.succeed()
    await slow.engine.until(lambda: len(slow.engine.adds) == 1)
    assert slow.engine.adds[0].tokens.tolist() == PROMPT + output(4)
    finish(slow)
    assert await task == output(20)


async def test_however_much_it_sent_last(slow: Any) -> None:
    task = await ask(slow, generation(max_tokens=2000))
    # More than a frontend takes in at a time.
    for _ in range(1500):
        slow.engine.step()
    slow.engine.crash(slow.frontend_bell)
    (add,) = await succeed(slow, 1)
    assert add.tokens.tolist() == PROMPT + output(1500)
    finish(slow)
    assert await task == output(2000)


async def test_one_whose_end_was_sent_is_not_given_away_again(slow: Any) -> None:
    ended, going = await ask(slow, generation(max_tokens=2)), await ask(slow, generation())
    slow.engine.step()
    slow.engine.step()
    slow.engine.crash(slow.frontend_bell)
    (add,) = await succeed(slow, 1)
    assert add.params.max_tokens == 20
    assert await ended == output(2)
    finish(slow)
    assert await going == output(20)


async def test_several_engines(slow: Any) -> None:
    task = await ask(slow, generation(max_tokens=40))
    for count in range(1, 4):
        for _ in range(PROBATION_TOKENS):
            slow.engine.step()
        await crash(slow)
        (add,) = await succeed(slow, 1)
        assert add.tokens.tolist() == PROMPT + output(count * PROBATION_TOKENS)
    finish(slow)
    assert await task == output(40)


async def test_an_engine_that_dies_before_its_hello(slow: Any) -> None:
    task = await ask(slow, generation())
    slow.engine.step()
    await crash(slow)
    slow.engine.crash(slow.frontend_bell)
    slow.engine.crash(slow.frontend_bell)
    (add,) = await succeed(slow, 1)
    assert add.tokens.tolist() == PROMPT + output(1)
    assert not add.is_suspect
    finish(slow)
    assert await task == output(20)


async def test_an_engine_that_says_hello_and_dies_at_once(slow: Any) -> None:
    task = await ask(slow, generation())
    slow.engine.step()
    await crash(slow)
    slow.engine.succeed()
    slow.engine.crash(slow.frontend_bell)
    await slow.until(lambda: slow.pump.facts.epoch == 2)
    await slow.until(lambda: slow.pump.engine is None)
    # What was meant for that one lies in the ring before what is meant for the next.
    (add,) = await succeed(slow, 1)
    assert add.tokens.tolist() == PROMPT + output(1)
    finish(slow)
    assert await task == output(20)


async def test_a_hello_that_is_said_twice_changes_nothing(slow: Any) -> None:
    task = await ask(slow, generation())
    slow.engine.hello()
    await slow.until(lambda: slow.pump.statistics().used_bytes == 0)
    assert await slow.client.call({"method": "ping"})
    assert len(slow.engine.adds) == 1
    finish(slow)
    assert await task == output(20)


# Who leaves, and who comes


async def test_who_leaves_meanwhile_is_not_given_to_the_next(slow: Any) -> None:
    staying, leaving = await ask(slow, generation()), await ask(slow, generation())
    cancelled = generation()
    stopped = await ask(slow, cancelled)
    slow.engine.step()
    await crash(slow)
    leaving.cancel()
    cancelled.cancel()
    await asyncio.wait([leaving, stopped])
    assert stopped.result() == output(1)
    assert len(await succeed(slow, 1)) == 1
    finish(slow)
    assert await staying == output(20)
    assert slow.engine.aborts == []


async def test_who_leaves_after_it_is_aborted_there(slow: Any) -> None:
    leaving = await ask(slow, generation())
    slow.engine.step()
    await crash(slow)
    (add,) = await succeed(slow, 1)
    leaving.cancel()
    await slow.engine.until(lambda: bool(slow.engine.aborts))
    assert slow.engine.aborts == [add.stream]


async def test_requests_that_come_meanwhile_wait(slow: Any) -> None:
    await crash(slow)
    tasks = [asyncio.create_task(slow.complete(max_tokens=2, stream=stream)) for stream in (False, True)]
    await slow.until(lambda: slow.client.num_live == 2)
    assert slow.client.admission.waiting == 2
    adds = await succeed(slow, 2)
    assert not any(add.has_run for add in adds)
    finish(slow)
    for task in tasks:
        assert (await task).status_code == 200


async def test_no_more_than_may_wait(run_harness: Any) -> None:
    async with run_harness(max_waiting=2) as frontend:
        await frontend.until(lambda: frontend.pump.engine is not None)
        await crash(frontend)
        tasks = [asyncio.create_task(frontend.complete(max_tokens=2)) for _ in range(2)]
        await frontend.until(lambda: frontend.client.num_live == 2)
        response = await frontend.complete(max_tokens=2)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        frontend.engine.succeed()
        assert {(await task).status_code for task in tasks} == {200}


async def test_time_in_the_queue_runs_on(slow: Any) -> None:
    soon = time.time_ns() + 10**8
    ran = await ask(slow, generation(deadline_ns=soon))
    slow.engine.step()
    await crash(slow)
    waiting = asyncio.create_task(collect(slow.client, generation(deadline_ns=soon)))
    later = asyncio.create_task(collect(slow.client, generation(deadline_ns=soon + 10**15)))
    with pytest.raises(Expired):
        await waiting
    adds = await succeed(slow, 2)
    # Who has begun to run has no deadline any more.
    assert [add.deadline_ns for add in adds] == [0, soon + 10**15]
    finish(slow)
    assert await ran == await later == output(20)


async def test_a_frontend_that_has_met_no_engine_yet_has_no_limits_to_go_by(run_harness: Any) -> None:
    async with run_harness(says_hello=False) as frontend:
        frontend.engine.board.publish(2, EngineState.STARTING)
        response = await frontend.complete(max_tokens=2)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_giving_up_ends_all_that_wait(slow: Any) -> None:
    ran = await ask(slow, generation())
    slow.engine.step()
    await crash(slow)
    came = asyncio.create_task(collect(slow.client, generation()))
    await slow.until(lambda: slow.client.num_live == 2)
    slow.engine.die(slow.frontend_bell)
    for task in (ran, came):
        with pytest.raises(EngineUnavailable, match="The engine died"):
            await task
    with pytest.raises(EngineUnavailable):
        await collect(slow.client, generation())


async def test_a_draining_frontend_keeps_its_streams_for_the_next_engine(slow: Any) -> None:
    task = await ask(slow, generation())
    slow.engine.step()
    slow.client.drain()
    await crash(slow)
    slow.engine.board.publish(slow.engine.epoch, EngineState.DRAINING)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await collect(slow.client, generation())
    assert slow.client.num_live == 1
    await succeed(slow, 1)
    finish(slow)
    assert await task == output(20)


# What is told of tokens


async def test_log_probabilities_go_on(slow: Any, events: Any) -> None:
    asking = {"prompt": PROMPT, "max_tokens": 9, "logprobs": 2, "echo": True, "ignore_eos": True}
    slow.engine.is_automatic = True
    wanted = (await slow.complete(**asking)).json()["choices"]
    slow.engine.is_automatic = False
    task = asyncio.create_task(slow.complete(**asking))
    await slow.engine.until(lambda: len(slow.engine.adds) == 2)
    add = slow.engine.adds[-1]
    # Half of the prompt's are there, and no token.
    slow.engine.begin([add.stream])
    slow.engine._push_prompt_logprobs(replace(add, tokens=add.tokens[:2], num_prompt=2), 2)
    await crash(slow)
    (add,) = await succeed(slow, 1)
    assert add.params.prompt_logprobs == 2
    for _ in range(3):
        slow.engine.step()
    await crash(slow)
    (add,) = await succeed(slow, 1)
    assert (add.params.logprobs, add.params.prompt_logprobs) == (2, None)
    finish(slow)
    assert (await task).json()["choices"] == wanted


async def test_usage_is_that_of_the_whole_answer(slow: Any) -> None:
    slow.engine.cached_tokens = 2
    task = asyncio.create_task(slow.complete(PROMPT, max_tokens=6, ignore_eos=True))
    await slow.engine.until(lambda: len(slow.engine.adds) == 1)
    for _ in range(2):
        slow.engine.step()
    await crash(slow)
    # It finds other things in its cache.
    slow.engine.cached_tokens = 3
    await succeed(slow, 1)
    finish(slow)
    usage = (await task).json()["usage"]
    assert usage["prompt_tokens"] == 3
    assert usage["completion_tokens"] == 6
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


async def test_it_began_when_it_first_began(slow: Any) -> None:
    wanted = generation()
    task = await ask(slow, wanted)
    slow.engine.step()
    await slow.until(lambda: wanted.began_s is not None)
    began_s = wanted.began_s
    await crash(slow)
    await succeed(slow, 1)
    finish(slow)
    await task
    assert wanted.began_s == began_s


# The rings as the dead one leaves them


async def test_a_request_that_was_half_sent(run_harness: Any) -> None:
    async with run_harness(ring_capacity=1 << 13) as frontend:
        engine = frontend.engine
        await frontend.until(lambda: frontend.pump.engine is not None)
        engine.stop()
        half = asyncio.create_task(collect(frontend.client, generation(20_000)))
        unsent = asyncio.create_task(collect(frontend.client, generation(30_000)))
        await frontend.until(lambda: frontend.sender.num_queued == 2)
        await crash(frontend)
        engine.succeed()
        assert len(await half) == len(await unsent) == 20
        assert [len(add.tokens) for add in engine.adds] == [20_000, 30_000]


async def test_a_request_that_was_half_read(run_harness: Any) -> None:
    async with run_harness(ring_capacity=1 << 13) as frontend:
        engine = frontend.engine
        await frontend.until(lambda: frontend.pump.engine is not None)
        engine.stop()
        half = asyncio.create_task(collect(frontend.client, generation(20_000)))
        await frontend.until(lambda: frontend.sender.num_queued == 1)
        engine.reader.read(1)
        engine.reader.release()
        await crash(frontend)
        engine.succeed()
        assert len(await half) == 20
        assert [len(add.tokens) for add in engine.adds] == [20_000]


async def test_a_ring_full_of_requests_for_the_dead_one(run_harness: Any) -> None:
    async with run_harness(ring_capacity=1 << 12) as frontend:
        engine = frontend.engine
        await frontend.until(lambda: frontend.pump.engine is not None)
        engine.stop()
        tasks = [asyncio.create_task(collect(frontend.client, generation(100 + at))) for at in range(40)]
        await frontend.until(lambda: frontend.sender.num_queued > 20)
        await crash(frontend)
        engine.succeed()
        assert {len(tokens) for tokens in await asyncio.gather(*tasks)} == {20}
        assert [len(add.tokens) for add in engine.adds] == [100 + at for at in range(40)]


async def test_an_answer_that_was_half_sent(run_harness: Any) -> None:
    async with run_harness(ring_capacity=1 << 13) as frontend:
        engine = frontend.engine
        engine.is_automatic = False
        await frontend.until(lambda: frontend.pump.engine is not None)
        task = await ask(frontend, generation())
        engine.writer.begin(Kind.STEP, [bytes(30_000)]).advance()
        await crash(frontend)
        await succeed(frontend, 1)
        finish(frontend)
        assert await task == output(20)


async def test_frames_of_the_dead_one_behind_the_hello_are_dropped(slow: Any) -> None:
    """There are none in the ring; of whatever else sends them, nothing is taken in."""
    task = await ask(slow, generation())
    await crash(slow)
    (add,) = await succeed(slow, 1)
    slow.engine.push_step([add.stream], [2], [Finish.STOP], [1, 1], epoch=1)
    finish(slow)
    assert await task == output(20)


# Requests that engines die of


async def test_what_ran_at_two_ends_in_a_row_is_a_suspect_and_at_the_third_is_failed(slow: Any) -> None:
    slow.engine.max_running = 2
    poison, innocent = await ask(slow, generation(tenant="p")), await ask(slow, generation(tenant="i"))
    waiting = await ask(slow, generation(tenant="w"))
    for wanted in (False, False, True):
        adds = slow.engine.adds
        assert [add.is_suspect for add in adds] == [wanted, wanted, False]
        if wanted:
            break
        slow.engine.step()
        await crash(slow)
        await succeed(slow, 3)
    # As an engine does that tries suspects one by one.
    slow.engine.begin([adds[0].stream])
    await crash(slow)
    with pytest.raises(RequestFailed, match="3 times in a row"):
        await poison
    adds = await succeed(slow, 2)
    assert [(add.tenant, add.is_suspect) for add in adds] == [("i", True), ("w", False)]
    finish(slow)
    assert await innocent == await waiting == output(20)
    recovery = slow.service.registry.metrics.recovery
    counted = (recovery.continued.value, recovery.suspected.value, recovery.poisonous.value)
    assert counted == (2 + 2 + 1, 2 + 1, 1)


async def test_of_two_suspects_only_the_last_to_run_is_to_blame(slow: Any) -> None:
    first, second = await ask(slow, generation(tenant="1")), await ask(slow, generation(tenant="2"))
    for _ in range(2):
        slow.engine.step()
        await crash(slow)
        adds = await succeed(slow, 2)
    # The tokens of the first are lost with the engine, which has acquitted it.
    for add in adds:
        slow.engine.begin([add.stream])
    await crash(slow)
    with pytest.raises(RequestFailed):
        await second
    await succeed(slow, 1)
    finish(slow)
    assert await first == output(20)


async def test_who_gets_ahead_is_no_suspect(slow: Any) -> None:
    task = await ask(slow, generation(max_tokens=100))
    for num_steps in (1, PROBATION_TOKENS, PROBATION_TOKENS - 1):
        for _ in range(num_steps):
            slow.engine.step()
        await crash(slow)
        (add,) = await succeed(slow, 1)
        assert add.is_suspect == (num_steps == PROBATION_TOKENS - 1)
    # It is acquitted as soon as it has got so many tokens from one engine.
    for _ in range(PROBATION_TOKENS):
        slow.engine.step()
    await crash(slow)
    (add,) = await succeed(slow, 1)
    assert not add.is_suspect
    finish(slow)
    assert await task == output(100)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_is_told_that_engines_die_of_its_request(slow: Any, events: Any, stream: bool) -> None:
    task = asyncio.create_task(slow.complete(PROMPT, max_tokens=50, stream=stream, ignore_eos=True))
    await slow.engine.until(lambda: len(slow.engine.adds) == 1)
    for _ in range(2):
        slow.engine.step()
        await crash(slow)
        await succeed(slow, 1)
    slow.engine.step()
    await crash(slow)
    response = await task
    error = events(response.text)[-1]["error"] if stream else response.json()["error"]
    assert response.status_code == (200 if stream else 500)
    assert (error["code"], error["type"]) == ("request_failed", "server_error")
    assert "not tried again" in error["message"]
    # Clients that try again after any other 500 would end five more engines, and with them the server.
    assert stream or response.headers["x-should-retry"] == "false"
    slow.engine.succeed()
    await slow.until_health(200, "ok")
    assert slow.engine.adds == []
