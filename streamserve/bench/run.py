"""The run: requests at their times, as many at once as are allowed, and what came of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from streamserve.bench.connection import ConnectionPool
from streamserve.bench.datasets import Sample
from streamserve.bench.timing import Clock, Outcome, StreamTimer, error_message

# For one request. As generous as the tool whose figures these are.
REQUEST_TIMEOUT_S = 6 * 3600.0
_READY_INTERVAL_S = 1.0

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Form:
    """What the body of a request looks like.

    Attributes:
        is_chat: the prompt is a user's message; else a text to go on with.
        model: the name to ask for.
        extra: further fields.
    """

    is_chat: bool
    model: str
    extra: Mapping[str, Any]

    def body(self, sample: Sample) -> bytes:
        """The body of one request."""
        common = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.is_chat:
            own: dict[str, Any] = {
                "messages": [{"role": "user", "content": sample.prompt}],
                "max_completion_tokens": sample.output_len,
            }
        else:
            own = {"prompt": sample.prompt, "max_tokens": sample.output_len}
        return orjson.dumps({**common, **own, **self.extra})


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends one request and times its answer.

    Attributes:
        pool: of connections.
        form: of the bodies.
        clock: tells the time of the run, in seconds.
        id_prefix: of the `X-Request-Id`; empty for none.
    """

    pool: ConnectionPool
    form: Form
    clock: Clock
    id_prefix: str = ""

    async def ask(self, sample: Sample, number: int) -> Outcome:
        """What came of the request with that number. A failure is an outcome too."""
        body = self.form.body(sample)
        request_id = f"{self.id_prefix}{number}" if self.id_prefix else ""
        outcome = Outcome(sample.prompt_len, start_time=self.clock())
        timer = StreamTimer(outcome)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                answer = await self.pool.post(body, request_id, timer.feed)
        except OSError as error:
            outcome.error = str(error) or type(error).__name__
        else:
            if answer.status != 200:
                outcome.error = f"HTTP {answer.status}: {_message(answer.refusal)}"
        timer.finish()
        return outcome


def _message(body: bytes) -> str:
    try:
        return error_message(orjson.loads(body))
    except (ValueError, AttributeError):
        return body[:200].decode(errors="replace") or "(nothing)"


async def run(
    sender: Sender,
    samples: Sequence[Sample],
    times: Sequence[float],
    max_concurrency: int | None,
    *,
    on_end: Callable[[Outcome], object],
    sleep: Sleep = asyncio.sleep,
) -> tuple[list[Outcome], float]:
    """Sends all requests.

    Args:
        sender: sends one.
        samples: the requests.
        times: seconds from the start at which each is due.
        max_concurrency: most that are open at once; what is due waits for its turn. None: any number.
        on_end: called after each answer, with what came of it.
        sleep: waits until the next one is due.

    Returns:
        What came of each, in their order, and the seconds from the start to the last answer.
    """
    turns = asyncio.Semaphore(len(samples) if max_concurrency is None else max_concurrency)
    begun = sender.clock()

    async def one(number: int, due: float) -> Outcome:
        outcome = await sender.ask(samples[number], number)
        turns.release()
        outcome.queue_time = outcome.start_time - due
        on_end(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as group:
        for number, time in enumerate(times):
            due = begun + time
            left = due - sender.clock()
            if left > 0.0:
                await sleep(left)
            # Here, so that only one waits: to cancel thousands that wait for a semaphore takes minutes.
            await turns.acquire()
            tasks.append(group.create_task(one(number, due)))
    return [task.result() for task in tasks], sender.clock() - begun


async def wait_ready(sender: Sender, sample: Sample, timeout_s: float, sleep: Sleep = asyncio.sleep) -> str:
    """Asks until an answer is whole, for up to `timeout_s` seconds; returns what is wrong then, or ""."""
    deadline = sender.clock() + timeout_s
    while True:
        outcome = await sender.ask(sample, 0)
        if outcome.is_success or sender.clock() >= deadline:
            return outcome.error
        await sleep(_READY_INTERVAL_S)
