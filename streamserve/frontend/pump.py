"""The frontend's end of the channel to the engine: drains the delta ring, keeps the engine's pulse.

One doorbell wakes the frontend for everything: deltas, room in the request ring, a change on the status
board. All of this runs in callbacks of the event loop; there is no task that could be forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from streamserve.errors import EngineUnavailable, RequestFailed
from streamserve.frontend.calls import Calls
from streamserve.frontend.live_requests import LiveRequests
from streamserve.frontend.mailbox import StreamTable
from streamserve.frontend.metrics import Metrics
from streamserve.frontend.sender import Sender
from streamserve.ipc.board import FIRST_EPOCH, EngineState
from streamserve.ipc.layout import RingCorrupted, RingStatistics
from streamserve.messages import (
    Kind,
    Logprobs,
    StepTokens,
    decode_begun,
    decode_call,
    decode_json,
    decode_prompt_logprobs,
    decode_step,
    epoch_of,
)

logger = logging.getLogger(__name__)

_BROKEN_FRAME = (struct.error, ValueError, KeyError, TypeError)
# Seconds that streams have to end with an error before a frontend with a damaged ring exits.
LAST_WORDS_S = 1.0

PULSE_INTERVAL_S = 0.25
PING_AFTER_S = 1.0
# Reads before the loop may run other work. A read takes up to 256 frames.
READS_PER_WAKE = 4


class Reader(Protocol):
    """The consumer's side of a ring (streamserve.ipc.ring.RingReader)."""

    def read(self, limit: int = 256) -> list[tuple[int, memoryview]]:
        """Whole messages, as views that are valid until `release()`."""

    def release(self) -> None:
        """Gives the room of all that was read back."""

    def arm(self) -> bool:
        """Asks to be woken by the next message; False if there is one now."""

    def disarm(self) -> None:
        """Takes that back."""

    def statistics(self) -> RingStatistics:
        """How full it is, and what went through."""


class Bell(Protocol):
    """What wakes this process (streamserve.ipc.doorbell.Doorbell)."""

    def fileno(self) -> int:
        """Readable when it rings."""

    def clear(self) -> None:
        """Silences it until it rings again."""


class Board(Protocol):
    """What the supervisor says about the engine (streamserve.ipc.board.StatusBoard)."""

    def read(self) -> tuple[int, EngineState]:
        """`(epoch, state)`."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says about itself when it is ready (the HELLO frame)."""

    epoch: int
    pid: int
    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    kv_capacity_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, hello: dict[str, Any]) -> EngineFacts:
        """From the frame's body; fields of a later version are ignored."""
        known = {item.name: hello[item.name] for item in fields(cls)}
        return cls(**{**known, "eos_token_ids": tuple(hello["eos_token_ids"])})


class Pulse:
    """When an engine was last heard, and when to ask whether it lives. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._heard_s = -math.inf
        self._asked_s = -math.inf

    def heard(self, now_s: float) -> None:
        """Something came from the engine."""
        self._heard_s = now_s

    def silence_s(self, now_s: float) -> float:
        """Seconds since then."""
        return now_s - self._heard_s

    def ask(self, now_s: float) -> bool:
        """Whether to ask now. One question at a time: a stuck engine's ring is not filled with them."""
        is_open = self._asked_s > self._heard_s
        if is_open or self.silence_s(now_s) < PING_AFTER_S:
            return False
        self._asked_s = now_s
        return True


def _knows_nothing(_question: Any) -> None:
    return None


class Pump:
    """Routes what comes from the engine.

    Args:
        reader: consumer's side of the delta ring.
        sender: the request ring's only writer.
        board: the supervisor's status board.
        bell: this frontend's doorbell.
        streams: where the mailboxes are.
        incarnation: which process on this channel it is (streamserve.messages).
        metrics: where it is counted what becomes of requests whose engine dies.

    Attributes:
        engine: the engine that serves now, or None while there is none.
        facts: what the last engine said about itself, whether or not it is still there.
        live: the requests that somebody waits for.
        gauges: the newest STATS body.
        on_relay: answers what another frontend asks; None says that this one knows nothing of it.
    """

    def __init__(
        self,
        reader: Reader,
        sender: Sender,
        board: Board,
        bell: Bell,
        streams: StreamTable,
        *,
        incarnation: int = 0,
        metrics: Metrics | None = None,
    ) -> None:
        self.engine: EngineFacts | None = None
        self.facts: EngineFacts | None = None
        self.live = LiveRequests(streams, sender, metrics or Metrics())
        self.gauges: dict[str, Any] = {}
        self.on_relay: Callable[[Any], Any] = _knows_nothing
        self._reader = reader
        self._sender = sender
        self._board = board
        self._bell = bell
        self._streams = streams
        self._incarnation = incarnation
        self._calls = Calls(sender)
        self._pulse = Pulse()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Set while there is an engine, and once there will be none.
        self._arrival = asyncio.Event()
        self._is_over = False

    def start(self) -> None:
        """Begins to listen, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._bell.fileno(), self._wake)
        self._beat()

    def stop(self) -> None:
        """Listens no more; live streams fail."""
        if self._loop is None:
            return
        self._loop.remove_reader(self._bell.fileno())
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
        self._reader.disarm()
        self._end("The server is shutting down.")

    @property
    def state(self) -> EngineState:
        """What this frontend may expect of the engine: READY only once it has said HELLO."""
        epoch, state = self._board.read()
        if self._is_over and state is not EngineState.DRAINING:
            return EngineState.DEAD
        if self.engine is None or epoch > self.engine.epoch:
            return EngineState.STARTING if state is EngineState.READY else state
        is_ending = epoch == self.engine.epoch and state in (EngineState.DRAINING, EngineState.DEAD)
        return state if is_ending else EngineState.READY

    @property
    def _awaits_successor(self) -> bool:
        """Whether there is no engine, and one will come in the place of another."""
        is_first = self._board.read()[0] <= FIRST_EPOCH
        return self.engine is None and not is_first and not self._is_over

    def silence_s(self) -> float:
        """Seconds since the engine was last heard."""
        return self._pulse.silence_s(time.monotonic())

    async def call(self, body: dict[str, Any]) -> Any:
        """The engine's answer to a control call.

        Raises:
            EngineUnavailable: there is no engine, or it went away.
        """
        if self.engine is None or self._loop is None:
            raise EngineUnavailable("The engine is not running.")
        return await self._calls.call(self.engine.epoch, body)

    async def relay(self, body: Any) -> Any | None:
        """What another frontend answers to `body`; None if none of them has an answer (see `Calls.relay`).

        The way to the others is the engine; if that dies, the next one has to come first. Before the first
        and after the last there is nothing live for them to know of: None as well.
        """
        while True:
            while self._awaits_successor:
                await self._arrival.wait()
            engine = self.engine
            if engine is None or self._loop is None:
                return None
            answer = await self._calls.relay(engine.epoch, body)
            if answer is not None or self.engine is engine:
                return answer

    def statistics(self) -> RingStatistics:
        """Of the delta ring."""
        return self._reader.statistics()

    def _wake(self) -> None:
        """The bell rang. Hot: at most once a step."""
        if self._loop is None:
            return
        self._bell.clear()
        self._reader.disarm()
        try:
            self._sender.flush()
            for _ in range(READS_PER_WAKE):
                if not self._drain() and self._reader.arm():
                    break
            else:
                self._loop.call_soon(self._wake)
            self._look_at_board()
        except RingCorrupted as error:
            self._give_up(error)

    def _drain(self) -> bool:
        """Handles one read; False if there was nothing."""
        messages = self._reader.read()
        if not messages:
            return False
        for kind, payload in messages:
            try:
                self._handle(kind, payload)
            except _BROKEN_FRAME as error:
                logger.error("a frame of kind %d cannot be read: %s", kind, error)
                if kind == Kind.STEP:
                    # Whose tokens were in it is not known: a stream that lacks some must not seem whole.
                    self._streams.fail_all(RequestFailed("The engine's answer was damaged."))
        del messages, payload
        self._reader.release()
        self._pulse.heard(time.monotonic())
        return True

    def _give_up(self, error: RingCorrupted) -> None:
        """Nothing in shared memory can be trusted any more: ends all streams, and soon this process."""
        logger.critical("the ring is damaged; this frontend ends: %s", error)
        assert self._loop is not None
        self._loop.remove_reader(self._bell.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._end("The server failed.")
        # Time for the streams to tell their clients; the supervisor sees the rest.
        self._loop.call_later(LAST_WORDS_S, sys.exit, 1)

    def _handle(self, kind: int, payload: memoryview) -> None:
        if kind == Kind.HELLO:
            self._take_hello(decode_json(payload))
        elif self.engine is None or epoch_of(payload) != self.engine.epoch:
            # From an engine that is gone, or for a frontend that is.
            return
        elif kind == Kind.STEP:
            self._route(payload)
        elif kind == Kind.BEGUN:
            self.live.begin(*decode_begun(payload))
        elif kind == Kind.PROMPT_LOGPROBS:
            stream, _, logprobs = decode_prompt_logprobs(payload)
            mailbox = self._streams.find(stream)
            if mailbox is not None:
                mailbox.put_prompt_logprobs(logprobs)
        elif kind == Kind.STATS:
            self.gauges = decode_json(payload)
        elif kind == Kind.REPLY:
            self._calls.take(*decode_call(payload))
        elif kind == Kind.RELAY:
            self._answer_relay(self.engine.epoch, *decode_call(payload))

    def _route(self, payload: memoryview) -> None:
        """Hands each stream its tokens. Hot: once a step; a list index and a slice for each stream."""
        step = decode_step(payload)
        if step.logprobs is not None:
            self._route_logprobs(step, step.logprobs)
        slots = self._streams.slots
        num_slots = len(slots)
        tokens = step.tokens.tolist()
        cached: Sequence[int] | None = None if step.cached is None else step.cached.tolist()
        at = 0
        for row, (stream, count, finish) in enumerate(step.rows()):
            end = at + count
            slot = stream & 0xFFFFFFFF
            mailbox = slots[slot] if slot < num_slots else None
            # Another generation, or nobody: the stream was aborted after the engine computed this.
            if mailbox is not None and mailbox.stream == stream:
                if cached is not None and cached[row]:
                    mailbox.cached_tokens = cached[row]
                mailbox.put(tokens[at:end], finish)
            at = end

    def _route_logprobs(self, step: StepTokens, logprobs: Logprobs) -> None:
        """Hands each stream that asked the rows of its tokens, which follow."""
        at = 0
        for stream, count, _ in step.rows():
            mailbox = self._streams.find(stream)
            if mailbox is not None and mailbox.num_top is not None:
                mailbox.put_logprobs(logprobs.rows(slice(at, at + count)))
            at += count

    def _answer_relay(self, epoch: int, call_id: int, question: dict[str, Any]) -> None:
        try:
            answer = self.on_relay(question["body"])
        except Exception:
            # The one that asked waits for every answer; this one has none.
            logger.exception("another frontend's question could not be answered")
            answer = None
        reply = {"method": "relay_reply", "to": question["origin"], "call_id": call_id, "body": answer}
        self._calls.send(epoch, reply)

    def _take_hello(self, body: dict[str, Any]) -> None:
        # One for a process that is gone may still lie in the ring, and tokens of its streams after it.
        if body["incarnation"] == self._incarnation:
            self._meet(EngineFacts.of(body))

    def _meet(self, engine: EngineFacts) -> None:
        if self.engine is not None:
            if engine.epoch == self.engine.epoch:
                # Said once more, for a process that is gone.
                return
            self._lose_engine(self.engine)
        self.engine = self.facts = engine
        self._is_over = False
        self._sender.reset(engine.epoch)
        num_requests = self.live.meet_engine(time.monotonic())
        logger.info("engine %d is ready: %s; %d requests", engine.epoch, engine.model, num_requests)
        self._arrival.set()

    def _look_at_board(self) -> None:
        epoch, state = self._board.read()
        engine = self.engine
        if state is EngineState.DEAD:
            if not self._is_over:
                self._end("The engine died.")
        elif engine is not None and epoch > engine.epoch:
            # It is gone. What it sent is in the ring, and maybe the words of the next one behind that.
            while self._drain():
                pass
            if self.engine is engine:
                self._lose_engine(engine)

    def _lose_engine(self, engine: EngineFacts) -> None:
        """Another engine will take its place, and its requests."""
        logger.warning("engine %d died with %d streams", engine.epoch, len(self._streams))
        self._disconnect("The engine died.")
        self.live.lose_engine(time.monotonic())

    def _end(self, why: str) -> None:
        """There will be no other engine: ends all that depends on one."""
        self._is_over = True
        self._disconnect(why)
        self.live.leave_engine()
        self._streams.fail_all(EngineUnavailable(why))
        self._arrival.set()

    def _disconnect(self, why: str) -> None:
        self.engine = None
        self.gauges = {}
        self._sender.reset(0)
        self._calls.fail(why)
        self._arrival.clear()

    def _beat(self) -> None:
        """Looks round, and asks a silent engine whether it lives. Four times a second."""
        if self._loop is None:
            return
        self._timer = self._loop.call_later(PULSE_INTERVAL_S, self._beat)
        self._wake()
        if self.engine is None:
            self.live.expire(time.time_ns())
        elif self._pulse.ask(time.monotonic()):
            self._calls.send(self.engine.epoch, {"method": "ping"})
