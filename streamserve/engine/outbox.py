"""Frames on their way to one frontend. The engine never waits for a frontend that is slow to read.

While the ring has room, a step is one frame. When it is full, what could not be sent is kept here, tokens
merged by stream, and goes out as soon as there is room: memory is bounded by the tokens of the live requests.

    outgoing ◄─ control frames, in order ◄─ backlog: unsent tokens by stream
    (joined, waits for room)

Control frames overtake tokens, never the other way round: that a stream has begun, and log probabilities of
its prompt, come before its first token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamserve.ipc.ring import FragmentedPush, RingWriter
from streamserve.messages import (
    Buffer,
    Kind,
    Logprobs,
    StepTokens,
    encode_begun,
    encode_call,
    encode_json,
    encode_prompt_logprobs,
    encode_step,
)

# Bytes of a STEP or PROMPT_LOGPROBS frame (streamserve.messages): its header, a stream with all columns, a
# token, its log probability, one of the likeliest tokens beside it.
_HEADER_BYTES, _ROW_BYTES, _TOKEN_BYTES, _CHOSEN_BYTES, _TOP_BYTES = 24, 17, 4, 4, 8


def _logprob_bytes(num_top: int) -> int:
    """Of a row of log probabilities."""
    return _CHOSEN_BYTES + _TOP_BYTES * num_top


@dataclass(slots=True)
class _Unsent:
    """What waits of one stream.

    Attributes:
        tokens, finish, cached: as in a STEP frame.
        logprobs: pieces that together have a row for each of `tokens`; empty if the stream did not ask.
    """

    tokens: list[int] = field(default_factory=list)
    finish: int = 0
    cached: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def num_top(self) -> int:
        """Width of the widest piece."""
        return max((piece.top.shape[1] for piece in self.logprobs), default=0)

    def take(self, count: int, num_top: int) -> tuple[list[int], Logprobs | None]:
        """Takes the first `count` tokens out, with log probabilities `num_top` wide."""
        tokens = self.tokens[:count]
        del self.tokens[:count]
        if not self.logprobs:
            return tokens, None
        merged = Logprobs.join([_widened(piece, num_top) for piece in self.logprobs])
        self.logprobs = [merged.rows(slice(count, None))] if self.tokens else []
        return tokens, merged.rows(slice(count))


def _widened(logprobs: Logprobs, num_top: int) -> Logprobs:
    """`logprobs` with columns that mean nothing up to a width of `num_top`."""
    missing = num_top - logprobs.top.shape[1]
    if missing <= 0:
        return logprobs
    pad = ((0, 0), (0, missing))
    return Logprobs(logprobs.chosen, np.pad(logprobs.top_ids, pad), np.pad(logprobs.top, pad))


class Outbox:
    """Sends frames to one frontend, in order, without ever blocking.

    Args:
        writer: the frontend's delta ring.
        epoch: this engine start.
        incarnation: which process reads it (streamserve.messages).
    """

    def __init__(self, writer: RingWriter, epoch: int, incarnation: int = 0) -> None:
        self.incarnation = incarnation
        self._writer = writer
        self._epoch = epoch
        self._facts: dict[str, Any] | None = None
        self._control: deque[tuple[Kind, bytes]] = deque()
        self._backlog: dict[int, _Unsent] = {}
        self._outgoing: tuple[Kind, bytes] | None = None
        self._fragments: FragmentedPush | None = None

    @property
    def has_backlog(self) -> bool:
        """Whether something waits for room in the ring."""
        is_sending = self._outgoing is not None or self._fragments is not None
        return is_sending or bool(self._control or self._backlog)

    def reset(self, incarnation: int) -> None:
        """Turns to the process that follows one that died: drops what waits, and says HELLO.

        A message that has begun to leave is finished. Like all else in the ring it comes before the HELLO, so
        nobody heeds it.
        """
        self.incarnation = incarnation
        self._control.clear()
        self._backlog.clear()
        if self._facts is not None:
            self.hello(self._facts)

    def step(self, tokens: StepTokens) -> None:
        """Sends one step's tokens. Hot: once a step.

        Args:
            tokens: with log probabilities, those that asked for them alone.
        """
        size = _HEADER_BYTES + _ROW_BYTES * len(tokens.streams) + _TOKEN_BYTES * len(tokens.tokens)
        if tokens.logprobs is not None:
            size += _logprob_bytes(tokens.logprobs.top.shape[1]) * len(tokens.tokens)
        if self.has_backlog or size > self._writer.max_message:
            self._keep(tokens)
            self.flush()
        elif not self._writer.try_push(Kind.STEP, encode_step(self._epoch, tokens)):
            self._keep(tokens)

    def prompt_logprobs(self, stream: int, start: int, logprobs: Logprobs) -> None:
        """Sends what is known of a part of a prompt; its stream must not have had a token yet."""
        num_rows, num_top = logprobs.top.shape
        fitting = max(1, (self._writer.max_message - _HEADER_BYTES) // _logprob_bytes(num_top))
        for at in range(0, num_rows, fitting):
            rows = logprobs.rows(slice(at, at + fitting))
            self._send(Kind.PROMPT_LOGPROBS, encode_prompt_logprobs(self._epoch, stream, start + at, rows))

    def begun(self, streams: Sequence[int], moment_ns: int) -> None:
        """Tells since when streams run; they must not have had a token yet."""
        self._send(Kind.BEGUN, encode_begun(self._epoch, streams, moment_ns))

    def hello(self, facts: dict[str, Any]) -> None:
        """Tells the frontend, and each process that follows it, that the engine serves, and what it holds."""
        self._facts = facts
        self._send(Kind.HELLO, encode_json(self._epoch, {**facts, "incarnation": self.incarnation}))

    def stats(self, numbers: dict[str, Any]) -> None:
        """Sends gauges and counters; left out while the ring is full, as newer ones follow."""
        if not self.has_backlog:
            self._writer.try_push(Kind.STATS, encode_json(self._epoch, numbers))

    def reply(self, call_id: int, body: Any) -> None:
        """Answers a CALL."""
        self._send(Kind.REPLY, encode_call(self._epoch, call_id, body))

    def relay(self, call_id: int, body: Any) -> None:
        """Hands on a CALL of another frontend."""
        self._send(Kind.RELAY, encode_call(self._epoch, call_id, body))

    def flush(self) -> bool:
        """Sends what waits, as far as there is room. True when nothing waits any more."""
        writer = self._writer
        while self.has_backlog:
            if self._fragments is not None:
                if not self._fragments.advance():
                    return False
                self._fragments = None
                continue
            if self._outgoing is None:
                self._outgoing = self._control.popleft() if self._control else self._backlog_frame()
            kind, payload = self._outgoing
            if len(payload) > writer.max_message:
                self._fragments = writer.begin(kind, (payload,))
            elif not writer.try_push(kind, (payload,)):
                return False
            self._outgoing = None
        return True

    def wait_for_room(self) -> bool:
        """Asks for the engine's bell when room appears. False when there is room already."""
        return self._writer.arm_space()

    def stop_waiting(self) -> None:
        """Takes `wait_for_room` back."""
        self._writer.disarm_space()

    def _send(self, kind: Kind, parts: list[Buffer]) -> None:
        # One buffer from here on: it is joined once, however often there is no room for it.
        self._control.append((kind, b"".join(parts)))
        self.flush()

    def _keep(self, tokens: StepTokens) -> None:
        ids = tokens.tokens.tolist()
        cached = tokens.cached.tolist() if tokens.cached is not None else [0] * len(tokens.streams)
        at = 0
        for (stream, count, finish), hit in zip(tokens.rows(), cached, strict=True):
            unsent = self._backlog.setdefault(stream, _Unsent())
            unsent.tokens += ids[at : at + count]
            unsent.finish = finish or unsent.finish
            unsent.cached = hit or unsent.cached
            if tokens.logprobs is not None:
                # A copy: whose memory this is, and how long it lasts, is the worker's business.
                unsent.logprobs.append(tokens.logprobs.rows(np.arange(at, at + count)))
            at += count

    def _backlog_frame(self) -> tuple[Kind, bytes]:
        """The next frame of unsent tokens, as many as may be in one; takes them out of the backlog.

        A frame is for streams with log probabilities or for streams without, as the first one is.
        """
        has_logprobs = bool(next(iter(self._backlog.values())).logprobs)
        alike = [entry for entry in self._backlog.items() if bool(entry[1].logprobs) == has_logprobs]
        num_top = max(unsent.num_top for _, unsent in alike)
        token_bytes = _TOKEN_BYTES + (_logprob_bytes(num_top) if has_logprobs else 0)
        room = self._writer.max_message - _HEADER_BYTES
        rows: list[tuple[int, int, int, int]] = []
        tokens: list[int] = []
        logprobs: list[Logprobs] = []
        for stream, unsent in alike:
            room -= _ROW_BYTES
            if rows and room < token_bytes:
                break
            # One token at least: a frame that is too long even so goes out in fragments.
            part, part_logprobs = unsent.take(max(1, room // token_bytes), num_top)
            room -= token_bytes * len(part)
            rows.append((stream, len(part), 0 if unsent.tokens else unsent.finish, unsent.cached))
            tokens += part
            if part_logprobs is not None:
                logprobs.append(part_logprobs)
            if not unsent.tokens:
                del self._backlog[stream]
        table = np.array(rows, dtype=np.int64).T
        frame = StepTokens(
            step=0,
            streams=np.array([row[0] for row in rows], dtype=np.uint64),
            counts=table[1].astype(np.uint32),
            finish=table[2].astype(np.uint8),
            tokens=np.array(tokens, dtype=np.int32),
            cached=table[3].astype(np.uint32),
            logprobs=Logprobs.join(logprobs) if logprobs else None,
        )
        return Kind.STEP, b"".join(encode_step(self._epoch, frame))
