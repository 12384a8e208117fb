"""An `EngineCore` on real rings with any number of frontends and a fake worker; the test is all frontends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scheduler_harness import LIMITS, FakeWorker, check_rows

from streamserve.engine.core import EngineCore
from streamserve.engine.outbox import Outbox
from streamserve.engine.process import EngineLoop, Rings
from streamserve.engine.scheduler import Scheduler, SchedulerLimits
from streamserve.engine.step import StepDiff, StepResult
from streamserve.hashing import BlockHasher
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment
from streamserve.messages import (
    AddRequest,
    Finish,
    Kind,
    Logprobs,
    StepTokens,
    decode_begun,
    decode_call,
    decode_json,
    decode_prompt_logprobs,
    decode_step,
    encode_abort,
    encode_add,
    encode_call,
)
from streamserve.sampling import SamplingParams

EPOCH = 3


class Died(Exception):
    """The engine's process would be gone."""


class FakeExecutor:
    """The fake worker of the scheduler's tests behind the engine's seam.

    Attributes:
        poison: tells the steps that kill the engine.
    """

    def __init__(self, limits: SchedulerLimits, depth: int = 1) -> None:
        self.worker = FakeWorker(limits)
        self.depth = depth
        self.num_submitted = 0
        self.poison: Callable[[StepDiff], bool] = lambda _diff: False
        self.numbers: dict[str, int] = {}
        # Of work to be done while nothing runs.
        self.num_pieces = 0

    def submit(self, diff: StepDiff) -> FakePending:
        if self.poison(diff):
            raise Died
        self.num_submitted += 1
        return FakePending(self.worker.execute(diff))

    def work_ahead(self) -> bool:
        self.num_pieces -= 1
        return self.num_pieces >= 0

    def statistics(self) -> dict[str, int]:
        return self.numbers


@dataclass
class FakePending:
    """A step that has run already."""

    step: StepResult

    def result(self) -> StepResult:
        return self.step


@dataclass
class Channel:
    """The rings of one frontend."""

    requests: Segment
    deltas: Segment
    bell: Doorbell
    writer: RingWriter
    reader: RingReader


@dataclass
class Received:
    """What a frontend got of one stream."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    num_prompt_rows: int = 0
    began_ns: int | None = None
    frames: list[StepTokens] = field(default_factory=list)
    aborted: bool = False

    def take(self, tokens: list[int], logprobs: Logprobs | None, finish: int) -> None:
        assert self.finish is Finish.NONE, "something after the end"
        assert self.began_ns is not None or not tokens, "a token before it began"
        num_top, position = self.params.logprobs, len(self.prompt) + len(self.tokens)
        if tokens and self.params.prompt_logprobs is not None:
            assert self.num_prompt_rows == len(self.prompt) - 1
        assert num_top is not None or logprobs is None, "rows that nobody asked for"
        if num_top is not None and tokens:
            check_rows(logprobs.rows(slice(None), num_top), position, tokens, num_top)
        self.tokens += tokens
        self.finish = Finish(finish)

    def begin(self, moment_ns: int) -> None:
        assert self.began_ns is None, "it begins once"
        self.began_ns = moment_ns

    def take_prompt(self, start: int, logprobs: Logprobs) -> None:
        assert not self.tokens
        assert start == self.num_prompt_rows + 1
        self.num_prompt_rows += len(logprobs.chosen)
        expected = self.prompt[start : start + len(logprobs.chosen)]
        check_rows(logprobs, start, expected, self.params.prompt_logprobs)


class CoreHarness:
    """Steps the core and collects what each frontend gets.

    Attributes:
        now_ns: what the engine takes for the wall clock.
        streams: for each frontend, its streams by number.
        replies, relays, stats: other frames of each frontend, decoded.
        num_bytes: of all frames read so far, for each frontend.
    """

    def __init__(
        self,
        num_frontends: int = 1,
        limits: SchedulerLimits = LIMITS,
        policy: str = "fcfs",
        capacity: int = 1 << 16,
        depth: int = 1,
    ) -> None:
        self.engine_bell = Doorbell.create()
        self.channels = [self._channel(capacity) for _ in range(num_frontends)]
        self.hasher = BlockHasher(b"k" * 32, limits.block_size)
        self.now_ns = 1000
        self._limits, self._policy, self._depth = limits, policy, depth
        self.boot(EPOCH)
        self.streams: list[dict[int, Received]] = [{} for _ in range(num_frontends)]
        self.replies: list[list[Any]] = [[] for _ in range(num_frontends)]
        self.relays: list[list[Any]] = [[] for _ in range(num_frontends)]
        self.stats: list[list[Any]] = [[] for _ in range(num_frontends)]
        self.frames: list[list[int]] = [[] for _ in range(num_frontends)]

    def _channel(self, capacity: int) -> Channel:
        requests, deltas = (Segment.create("core", ring_bytes(capacity)) for _ in range(2))
        for segment in (requests, deltas):
            format_ring(segment.view, capacity)
        bell = Doorbell.create()
        writer = RingWriter(requests.view, self.engine_bell)
        return Channel(requests, deltas, bell, writer, RingReader(deltas.view, self.engine_bell))

    def boot(self, epoch: int) -> None:
        """A new engine on the rings as they are."""
        self.scheduler = Scheduler(self._limits, self.hasher, self._policy)
        self.executor = FakeExecutor(self._limits, self._depth)
        inboxes = [RingReader(channel.requests.view, channel.bell) for channel in self.channels]
        outboxes = [Outbox(RingWriter(channel.deltas.view, channel.bell), epoch) for channel in self.channels]
        self.rings = Rings(inboxes, outboxes, self.engine_bell)
        self.core = EngineCore(
            self.scheduler, self.executor, inboxes, outboxes, epoch, wall_clock_ns=lambda: self.now_ns
        )
        self.loop = EngineLoop(self.core, self.rings)

    def __enter__(self) -> CoreHarness:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self.channels:
            for closable in (channel.requests, channel.deltas, channel.bell):
                closable.close()
        self.engine_bell.close()

    def add(
        self,
        frontend: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        **rest: Any,
    ) -> int:
        """Sends a request and returns its stream number."""
        tokens = np.array(prompt, dtype=np.int32)
        hashes = self.hasher.chain(tokens, self.hasher.root(cache_salt.encode()))
        stream = len(self.streams[frontend])
        request = AddRequest(stream, tokens, len(prompt), params, hashes, cache_salt=cache_salt, **rest)
        self.streams[frontend][stream] = Received(list(prompt), params)
        self.push(frontend, Kind.ADD, encode_add(EPOCH, request))
        return stream

    def abort(self, frontend: int, stream: int) -> None:
        """Nobody waits for `stream` any more; what is still on its way is checked all the same."""
        self.streams[frontend][stream].aborted = True
        self.push(frontend, Kind.ABORT, encode_abort(EPOCH, [stream]))

    def call(self, frontend: int, call_id: int, body: Any) -> None:
        self.push(frontend, Kind.CALL, encode_call(EPOCH, call_id, body))

    def push(self, frontend: int, kind: Kind, parts: list[Any]) -> None:
        assert self.channels[frontend].writer.try_push(kind, parts)

    def step(self) -> bool:
        """One engine step, and what came of it."""
        busy = self.core.step()
        self.read_all()
        return busy

    def read_all(self) -> None:
        for frontend in range(len(self.channels)):
            self.read(frontend)

    def read(self, frontend: int) -> None:
        """Takes what is in the ring of one frontend."""
        reader = self.channels[frontend].reader
        for kind, payload in reader.read():
            self._take(frontend, kind, payload)
        reader.release()

    def _take(self, frontend: int, kind: int, payload: memoryview) -> None:
        streams = self.streams[frontend]
        self.frames[frontend].append(kind)
        if kind == Kind.STEP:
            self._take_step(streams, decode_step(payload))
        elif kind == Kind.BEGUN:
            begun, moment_ns = decode_begun(payload)
            for stream in begun:
                if stream in streams:
                    streams[stream].begin(moment_ns)
        elif kind == Kind.PROMPT_LOGPROBS:
            stream, start, logprobs = decode_prompt_logprobs(payload)
            if stream in streams:
                streams[stream].take_prompt(start, logprobs)
        elif kind == Kind.REPLY:
            self.replies[frontend].append(decode_call(payload))
        elif kind == Kind.RELAY:
            self.relays[frontend].append(decode_call(payload))
        elif kind == Kind.STATS:
            self.stats[frontend].append(decode_json(payload))

    def _take_step(self, streams: dict[int, Received], step: StepTokens) -> None:
        at = 0
        for stream, count, finish in step.rows():
            end = at + count
            if stream in streams:
                logprobs = None if step.logprobs is None else step.logprobs.rows(slice(at, end))
                streams[stream].take(step.tokens[at:end].tolist(), logprobs, finish)
                streams[stream].frames.append(step)
            at = end

    def run(self, most_steps: int = 5000) -> None:
        """Steps until nothing is left to do or to send."""
        for _ in range(most_steps):
            busy = self.step()
            is_sent = [outbox.flush() for outbox in self.rings.outboxes]
            self.read_all()
            if not busy and all(is_sent):
                return
        raise AssertionError(f"still busy after {most_steps} steps")
