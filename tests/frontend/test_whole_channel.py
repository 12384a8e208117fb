"""Two frontends and one engine, all real but the worker: what goes in at one end comes out at the other."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from core_harness import EPOCH, CoreHarness, Died
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_harness import alone, check_rows, limits, prompt

from streamserve.engine.step import StepDiff
from streamserve.errors import Expired, RequestPoisonous
from streamserve.frontend.calls import RELAY_TIMEOUT_S
from streamserve.frontend.client import EngineClient, Generation
from streamserve.frontend.limits import Admission
from streamserve.frontend.mailbox import StreamTable
from streamserve.frontend.pump import Pump
from streamserve.frontend.sender import Sender
from streamserve.ipc.board import EngineState, StatusBoard
from streamserve.messages import Finish, Logprobs
from streamserve.sampling import SamplingParams

SIZES = limits(max_num_batched_tokens=24, num_blocks=30, block_size=4, max_model_len=100)
FACTS = {
    "epoch": EPOCH,
    "pid": os.getpid(),
    "model": "fake",
    "max_model_len": 100,
    "vocab_size": 40,
    "block_size": 4,
    "num_blocks": 30,
    "kv_capacity_tokens": 120,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "enable_prefix_caching": True,
    "eos_token_ids": [7],
}


@dataclass
class Whole:
    """An engine that steps whenever the event loop lets it, and its frontends."""

    core: CoreHarness
    clients: list[EngineClient]
    board: StatusBoard
    is_paused: bool = False
    steps_a_turn: int = 1
    num_deaths: int = 0

    async def run_engine(self) -> None:
        while True:
            if not self.is_paused:
                try:
                    for _ in range(self.steps_a_turn):
                        self.core.core.step()
                    for outbox in self.core.rings.outboxes:
                        outbox.flush()
                except Died:
                    self.die()
                    self.succeed()
            await asyncio.sleep(0)

    @property
    def epoch(self) -> int:
        return EPOCH + self.num_deaths

    def die(self) -> None:
        """The engine is gone, and another will come."""
        self.is_paused = True
        self.num_deaths += 1
        self.publish(EngineState.STARTING)

    def succeed(self) -> None:
        """The next engine is there, on the rings as they are."""
        poison = self.core.executor.poison
        self.core.boot(self.epoch)
        self.core.executor.poison = poison
        for outbox in self.core.rings.outboxes:
            outbox.hello({**FACTS, "epoch": self.epoch})
        self.publish(EngineState.READY)
        self.is_paused = False

    def publish(self, state: EngineState) -> None:
        self.board.publish(self.epoch, state)
        for channel in self.core.channels:
            channel.bell.ring()

    def generation(self, tokens: list[int], params: SamplingParams, **rest: Any) -> Generation:
        prompt = np.array(tokens, dtype=np.int32)
        root = self.core.hasher.root(rest.get("cache_salt", "").encode())
        return Generation(prompt, params, self.core.hasher.chain(prompt, root), **rest)


@asynccontextmanager
async def serving(num_frontends: int = 2, **options: Any) -> AsyncIterator[Whole]:
    board = StatusBoard.create()
    with CoreHarness(num_frontends, **{"limits": SIZES, **options}) as core:
        clients = []
        for channel in core.channels:
            sender, streams = Sender(channel.writer), StreamTable()
            pump = Pump(channel.reader, sender, board, channel.bell, streams)
            clients.append(EngineClient(pump, sender, streams, Admission(64), 30.0))
        whole = Whole(core, clients, board)
        board.publish(EPOCH, EngineState.READY)
        for client, outbox in zip(clients, core.rings.outboxes, strict=True):
            outbox.hello(FACTS)
            client.start()
        engine = asyncio.create_task(whole.run_engine())
        try:
            async with asyncio.timeout(60):
                yield whole
            assert [client.num_live for client in clients] == [0] * num_frontends
            assert not any(client.admission.waiting for client in clients)
            await until(lambda: not core.scheduler.has_work)
            statistics = core.scheduler.statistics()
            assert statistics.free_blocks == statistics.num_blocks
        finally:
            engine.cancel()
            await asyncio.wait([engine])
            for client in clients:
                client.stop()
            board.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  (nothing rings for it)
            await asyncio.sleep(0)


@dataclass
class Collected:
    """What came of one generation."""

    tokens: list[int]
    logprobs: list[Logprobs | None]
    finish: int


async def collect(client: EngineClient, generation: Generation, cancel_after: int | None = None) -> Collected:
    got = Collected([], [], 0)
    async with aclosing(client.generate(generation)) as deltas:
        async for delta in deltas:
            assert not got.finish
            assert generation.began_s is not None or not delta.tokens
            got.tokens += delta.tokens
            got.logprobs.append(delta.logprobs)
            got.finish = delta.finish
            if cancel_after is not None and len(got.tokens) >= cancel_after:
                generation.cancel()
    return got


def check(generation: Generation, got: Collected) -> None:
    """Tokens and log probabilities are those that the request gets alone."""
    params, tokens = generation.params, generation.prompt.tolist()
    wanted, finish = alone(tokens, len(tokens), params, SIZES)
    if got.finish == Finish.ABORT:
        assert got.tokens == wanted[: len(got.tokens)]
    else:
        assert (got.tokens, got.finish) == (wanted, finish)
    if params.logprobs is None:
        assert set(got.logprobs) <= {None}
    else:
        check_rows(Logprobs.join(got.logprobs), len(tokens), got.tokens, params.logprobs)
    if params.prompt_logprobs is None or not got.tokens:
        assert generation.prompt_logprobs is None
    else:
        check_rows(generation.prompt_logprobs, 1, tokens[1:], params.prompt_logprobs)


async def test_log_probabilities_of_prompt_and_answer():
    async with serving() as whole:
        params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2)
        wanted = [whole.generation(prompt(50, seed), params) for seed in range(4)]
        plain = whole.generation(prompt(5, 9), SamplingParams(max_tokens=20, ignore_eos=True))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(collect(whole.clients[index % 2], generation))
                for index, generation in enumerate([*wanted, plain])
            ]
        for generation, task in zip([*wanted, plain], tasks, strict=True):
            check(generation, task.result())


async def test_cached_tokens_with_the_first_delta():
    async with serving() as whole:
        for salt, cached in (("", 0), ("", 16), ("salt", 0), ("salt", 16)):
            generation = whole.generation(prompt(20), SamplingParams(max_tokens=1), cache_salt=salt)
            async with aclosing(whole.clients[0].generate(generation)) as deltas:
                await anext(deltas)
                assert generation.cached_tokens == cached


async def test_it_is_known_since_when_a_request_runs():
    async with serving(limits=limits(max_num_seqs=1)) as whole:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        generations = [whole.generation(prompt(5, seed), params) for seed in (1, 2)]
        before_s = time.monotonic()
        # The one waits for the other.
        await asyncio.gather(*map(collect, whole.clients, generations))
        first_s, second_s = sorted(generation.began_s for generation in generations)
        assert before_s <= first_s < second_s <= time.monotonic()


async def test_a_request_whose_time_in_the_queue_runs_out():
    async with serving(limits=limits(max_num_seqs=1)) as whole:
        long = whole.generation(prompt(5), SamplingParams(max_tokens=100, ignore_eos=True))
        running = asyncio.ensure_future(collect(whole.clients[0], long))
        await until(lambda: whole.core.scheduler.statistics().running == 1)
        whole.is_paused = True
        late = whole.generation(prompt(5), SamplingParams(max_tokens=5), deadline_ns=2000)
        waiting = asyncio.ensure_future(collect(whole.clients[1], late))
        await until(lambda: whole.clients[1].num_live == 1)
        whole.core.now_ns = 2000
        whole.is_paused = False
        with pytest.raises(Expired):
            await waiting
        assert len((await running).tokens) == 100


async def test_a_relay_finds_the_frontend_that_knows():
    async with serving(3) as whole:
        asked: list[Any] = []

        def answer(question: Any) -> Any:
            asked.append(question)
            return {"found": question["id"]} if question["id"] == "mine" else None

        whole.clients[2].answer_relays(answer)
        assert await whole.clients[0].relay({"id": "mine"}) == {"found": "mine"}
        # Nobody's: known as soon as all others have said so.
        assert await whole.clients[0].relay({"id": "other"}) is None
        # Its own answer is not asked for.
        assert await whole.clients[2].relay({"id": "mine"}) is None
        assert asked == [{"id": "mine"}, {"id": "other"}]
        answers = await asyncio.gather(*[whole.clients[number].relay({"id": "mine"}) for number in (0, 1)])
        assert answers == [{"found": "mine"}] * 2


async def test_a_relay_from_the_only_frontend():
    async with serving(1) as whole:
        assert await whole.clients[0].relay("anybody?") is None


async def test_a_frontend_that_cannot_answer_has_no_answer(caplog: pytest.LogCaptureFixture):
    async with serving() as whole:
        whole.clients[1].answer_relays(lambda question: question["no such key"])
        assert await whole.clients[0].relay({}) is None
    assert "could not be answered" in caplog.text


async def test_a_frontend_that_does_not_answer_is_not_waited_for():
    async with serving() as whole:
        whole.clients[1].stop()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert await whole.clients[0].relay({}) is None
        assert loop.time() - began_s >= RELAY_TIMEOUT_S


async def test_without_an_engine_nobody_is_asked():
    async with serving() as whole:
        whole.clients[0].stop()
        assert await whole.clients[0].relay({}) is None


@st.composite
def wishes(draw):
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 20)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 0, 3, 20])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 20])),
    )
    rest = {"tenant": draw(st.sampled_from(["", "a"])), "priority": draw(st.integers(0, 1))}
    cancel_after = draw(st.sampled_from([None, None, None, 1, 5]))
    tokens = prompt(draw(st.integers(1, 60)), draw(st.integers(0, 3)))
    return draw(st.integers(0, 1)), tokens, params, rest, cancel_after


# Turns of the event loop that an engine lives, and that there is none after it. After three deaths in a row
# somebody would be blamed.
LIVES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=2)


@settings(max_examples=40, deadline=None)
@given(
    crowd=st.lists(wishes(), min_size=2, max_size=16),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    capacity=st.sampled_from([1 << 11, 1 << 14]),
    steps_a_turn=st.integers(1, 20),
    depth=st.integers(1, 2),
    lives=st.just([]) | LIVES,
)
def test_any_crowd(crowd, policy, capacity, steps_a_turn, depth, lives):
    """In many steps a turn the engine outruns the frontends: rings fill up, and deltas are merged.

    Engines may die; that is nothing to be seen.
    """

    async def kill(whole: Whole) -> None:
        for num_turns, num_without in lives:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            whole.die()
            for _ in range(num_without):
                await asyncio.sleep(0)
            whole.succeed()

    async def run() -> None:
        async with serving(policy=policy, capacity=capacity, depth=depth) as whole:
            whole.steps_a_turn = steps_a_turn
            killing = asyncio.create_task(kill(whole))
            wanted = [whole.generation(tokens, params, **rest) for _, tokens, params, rest, _ in crowd]
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(collect(whole.clients[wish[0]], generation, wish[4]))
                    for wish, generation in zip(crowd, wanted, strict=True)
                ]
            for generation, task in zip(wanted, tasks, strict=True):
                check(generation, task.result())
                event(f"finish {task.result().finish}")
            await killing
            event(f"deaths {whole.num_deaths}")

    asyncio.run(run())


def poisonous(diff: StepDiff) -> bool:
    """Whether one with the prompt that nobody survives runs, at whatever place of its output."""
    return any(join.tokens[: len(POISON)].tolist() == POISON for join in diff.joins)


POISON = prompt(30, 77)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_innocent", [1, 8])
async def test_one_that_engines_die_of_is_failed_and_nobody_else(num_innocent, depth):
    async with serving(limits=limits(max_num_seqs=16), depth=depth) as whole:
        whole.core.executor.poison = poisonous
        params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2)
        innocent = [whole.generation(prompt(20, seed), params) for seed in range(num_innocent)]
        poison = whole.generation(POISON, params)
        async with asyncio.TaskGroup() as group:
            others = [
                group.create_task(collect(whole.clients[at % 2], generation))
                for at, generation in enumerate(innocent)
            ]
            with pytest.raises(RequestPoisonous, match="3 times in a row"):
                await collect(whole.clients[0], poison)
        for generation, task in zip(innocent, others, strict=True):
            check(generation, task.result())
        assert whole.num_deaths == 3


async def test_two_that_engines_die_of():
    async with serving(limits=limits(max_num_seqs=16)) as whole:
        whole.core.executor.poison = poisonous
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        innocent = [whole.generation(prompt(9, seed), params) for seed in range(6)]
        async with asyncio.TaskGroup() as group:
            others = [
                group.create_task(collect(whole.clients[at % 2], one)) for at, one in enumerate(innocent)
            ]
            culprits = [collect(client, whole.generation(POISON, params)) for client in whole.clients]
            failures = await asyncio.gather(*culprits, return_exceptions=True)
        assert [type(failure) for failure in failures] == [RequestPoisonous] * 2
        for generation, task in zip(innocent, others, strict=True):
            check(generation, task.result())
        # The second is known from the start: it has been there as often as the first.
        assert whole.num_deaths == 4


async def test_a_relay_waits_for_the_next_engine():
    async with serving(3) as whole:
        whole.clients[2].answer_relays(lambda question: {"found": question})
        whole.die()
        await until(lambda: whole.clients[0].state is EngineState.STARTING)
        asked = asyncio.ensure_future(whole.clients[0].relay("mine"))
        await asyncio.sleep(0.01)
        assert not asked.done()
        whole.succeed()
        assert await asked == {"found": "mine"}


async def test_a_relay_that_died_with_the_engine_is_asked_again():
    async with serving(3) as whole:
        whole.is_paused = True
        whole.clients[2].answer_relays(lambda question: {"found": question})
        asked = asyncio.ensure_future(whole.clients[0].relay("mine"))
        await asyncio.sleep(0.01)
        whole.die()
        await until(lambda: whole.clients[0].state is EngineState.STARTING)
        whole.succeed()
        assert await asked == {"found": "mine"}


async def test_a_relay_does_not_wait_for_an_engine_that_will_not_come():
    async with serving(2) as whole:
        whole.die()
        await until(lambda: whole.clients[0].state is EngineState.STARTING)
        asked = asyncio.ensure_future(whole.clients[0].relay("mine"))
        await asyncio.sleep(0.01)
        whole.publish(EngineState.DEAD)
        assert await asked is None
        assert await whole.clients[0].relay("mine") is None
