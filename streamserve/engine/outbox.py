"""Token deltas on their way to one frontend. The engine never waits for a frontend that is slow to read.

While the ring has room, a step is one frame. When it is full, what could not be sent is kept here, merged by
stream, and goes out as soon as there is room: memory is bounded by the tokens of the live requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamserve.ipc.ring import RingWriter
from streamserve.messages import Buffer, Kind, StepTokens, encode_call, encode_json, encode_step

# Bytes of a STEP frame (streamserve.messages): its header, a row with all columns, a token.
_HEADER_BYTES, _ROW_BYTES, _TOKEN_BYTES = 24, 17, 4


@dataclass(slots=True)
class _Unsent:
    tokens: list[int] = field(default_factory=list)
    finish: int = 0
    cached: int = 0


class Outbox:
    """Sends frames to one frontend, in order, without ever blocking.

    Args:
        writer: the frontend's delta ring.
        epoch: this engine start.
    """

    def __init__(self, writer: RingWriter, epoch: int) -> None:
        self._writer = writer
        self._epoch = epoch
        self._control: deque[tuple[Kind, list[Buffer]]] = deque()
        self._backlog: dict[int, _Unsent] = {}

    @property
    def has_backlog(self) -> bool:
        """Whether something waits for room in the ring."""
        return bool(self._control or self._backlog)

    def step(self, tokens: StepTokens) -> None:
        """Sends one step's tokens. Hot: once a step."""
        size = _HEADER_BYTES + _ROW_BYTES * len(tokens.streams) + _TOKEN_BYTES * len(tokens.tokens)
        if self._backlog or size > self._writer.max_message:
            self._keep(tokens)
            self.flush()
        elif not self._writer.try_push(Kind.STEP, encode_step(self._epoch, tokens)):
            self._keep(tokens)

    def hello(self, facts: dict[str, Any]) -> None:
        """Tells the frontend that the engine serves, and what it can hold."""
        self._send(Kind.HELLO, encode_json(self._epoch, facts))

    def stats(self, numbers: dict[str, Any]) -> None:
        """Sends gauges and counters; left out while the ring is full, as newer ones follow."""
        if not self.has_backlog:
            self._writer.try_push(Kind.STATS, encode_json(self._epoch, numbers))

    def reply(self, call_id: int, body: Any) -> None:
        """Answers a CALL."""
        self._send(Kind.REPLY, encode_call(self._epoch, call_id, body))

    def flush(self) -> bool:
        """Sends what waits, as far as there is room. True when nothing waits any more."""
        while self._control:
            if not self._writer.try_push(*self._control[0]):
                return False
            self._control.popleft()
        while self._backlog:
            frame = self._next_backlog_frame()
            if not self._writer.try_push(Kind.STEP, encode_step(self._epoch, frame)):
                return False
            self._drop_sent(frame)
        return True

    def wait_for_room(self) -> bool:
        """Asks for the engine's bell when room appears. False when there is room already."""
        return self._writer.arm_space()

    def stop_waiting(self) -> None:
        """Takes `wait_for_room` back."""
        self._writer.disarm_space()

    def _send(self, kind: Kind, parts: list[Buffer]) -> None:
        if self._control or not self._writer.try_push(kind, parts):
            self._control.append((kind, parts))

    def _keep(self, tokens: StepTokens) -> None:
        ids = tokens.tokens.tolist()
        cached = tokens.cached.tolist() if tokens.cached is not None else [0] * len(tokens.streams)
        at = 0
        rows = zip(
            tokens.streams.tolist(), tokens.counts.tolist(), tokens.finish.tolist(), cached, strict=True
        )
        for stream, count, finish, hit in rows:
            unsent = self._backlog.setdefault(stream, _Unsent())
            unsent.tokens += ids[at : at + count]
            unsent.finish = finish or unsent.finish
            unsent.cached = hit or unsent.cached
            at += count

    def _next_backlog_frame(self) -> StepTokens:
        streams: list[int] = []
        counts: list[int] = []
        finish: list[int] = []
        cached: list[int] = []
        tokens: list[int] = []
        room = self._writer.max_message - _HEADER_BYTES
        for stream, unsent in self._backlog.items():
            room -= _ROW_BYTES
            if room < _TOKEN_BYTES:
                break
            part = unsent.tokens[: room // _TOKEN_BYTES]
            room -= _TOKEN_BYTES * len(part)
            whole = len(part) == len(unsent.tokens)
            streams.append(stream)
            counts.append(len(part))
            finish.append(unsent.finish if whole else 0)
            cached.append(unsent.cached)
            tokens += part
        return StepTokens(
            step=0,
            streams=np.array(streams, dtype=np.uint64),
            counts=np.array(counts, dtype=np.uint32),
            finish=np.array(finish, dtype=np.uint8),
            tokens=np.array(tokens, dtype=np.int32),
            cached=np.array(cached, dtype=np.uint32),
        )

    def _drop_sent(self, frame: StepTokens) -> None:
        for stream, count in zip(frame.streams.tolist(), frame.counts.tolist(), strict=True):
            unsent = self._backlog[stream]
            if count == len(unsent.tokens):
                del self._backlog[stream]
            else:
                del unsent.tokens[:count]
