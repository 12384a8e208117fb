"""The ring against a socket: one step frame of 64 deltas between two processes, over and over.

`python -m loadtest.micro.ring`

What is compared, from message to message, encoding and decoding included:

- ring: `messages.encode_step` → shared-memory ring → `messages.decode_step`, columns as arrays
- rows: a msgspec Struct for each delta, 64 in a message, as servers with a socket between frontend and
  engine send them → msgpack → pyzmq over ipc:// → typed msgspec Structs
- columns: the same way, but one Struct with lists of 64 ints: the shape that suits msgpack best, to compare

The bars are for rows. Each side starts from a message as its owner would hold it and encodes it anew for
every frame.

One way: the engine sends as fast as it can and the frontend decodes all. Round trip: the frontend sends a
frame, the engine decodes it, encodes another and sends that back.

How they wait. Ring, round trip: the frontend sleeps as soon as the ring is empty, in poll on its doorbell, as
an event loop does in epoll; the engine spins for a moment before it sleeps, as it may while it has work in
flight. One way: the frontend looks a few dozen times before it sleeps, or it would sleep and be woken for
every frame, being faster than the engine; when the ring is full the engine sleeps until half of it is free.
zmq: both sides block in send and recv (PUSH and PULL one way, PAIR for the round trip) and zmq's own I/O
threads do the rest, at its default limits.

Each process runs on half of the processors of the machine, its I/O thread included, so that the two are never
put on one processor by chance. Ring and zmq run in the same two processes in turns (ring zmq, zmq ring, …); a
round's ratio pairs neighbours, and the median over the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import zmq

from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment
from streamserve.messages import Kind, StepTokens, decode_step, encode_step

NUM_STREAMS = 64
ROUNDS = 9
RING_FRAMES = 60_000
ZMQ_FRAMES = 20_000
ROUND_TRIPS = 1_000
RING_CAPACITY = 1 << 22
ENGINE_SPINS = 500
STREAM_SPINS = 50
TIMEOUT_S = 90

LEAST_SPEEDUP = 5.0
MOST_ROUND_TRIP = 1 / 3


class DeltaStruct(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg]
    """What one stream got in a step."""

    stream: int
    tokens: list[int]
    finish: int = 0


class RowsStruct(msgspec.Struct, array_like=True, gc=False):  # type: ignore[call-arg]
    """A step, a struct for each stream."""

    epoch: int
    step: int
    deltas: list[DeltaStruct]


class ColumnsStruct(msgspec.Struct, array_like=True, gc=False):  # type: ignore[call-arg]
    """A step, a list for each column of `StepTokens`."""

    epoch: int
    step: int
    streams: list[int]
    counts: list[int]
    tokens: list[int]
    finish: list[int]


def example_step() -> StepTokens:
    """A decode step: one token for each of 64 streams, none of which ends."""
    slots = np.arange(NUM_STREAMS, dtype=np.uint64)
    return StepTokens(
        step=1_000_000,
        streams=slots | np.uint64(3 << 32),
        tokens=(slots * 700 + 500).astype(np.int32),
    )


def rows_of(step: StepTokens) -> RowsStruct:
    """`step` as rows."""
    columns = zip(step.streams.tolist(), step.tokens.tolist(), strict=True)
    return RowsStruct(1, step.step, [DeltaStruct(stream, [token]) for stream, token in columns])


def columns_of(step: StepTokens) -> ColumnsStruct:
    """`step` as columns."""
    ones, zeros = [1] * NUM_STREAMS, [0] * NUM_STREAMS
    return ColumnsStruct(1, step.step, step.streams.tolist(), ones, step.tokens.tolist(), zeros)


class Link(Protocol):
    """One end of a way between the two processes; the other process holds the other end."""

    num_frames: int

    def send_all(self) -> None:
        """Sends `num_frames` as fast as they go."""

    def receive_all(self) -> float:
        """Decodes `num_frames`; seconds from the first to the last."""

    def ask(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips."""

    def answer(self, count: int) -> None:
        """The other side of `ask`."""


class RingLink:
    """A ring each way.

    Args:
        incoming: segment that this side reads.
        outgoing: segment that it writes.
        own_bell: wakes this side.
        peer_bell: wakes the other.
        spins: looks at an empty ring before going to sleep, in round trips.
    """

    num_frames = RING_FRAMES

    def __init__(self, incoming: int, outgoing: int, own_bell: int, peer_bell: int, spins: int) -> None:
        self._bell, peer = Doorbell.attach(own_bell), Doorbell.attach(peer_bell)
        self._reader = RingReader(Segment.attach(incoming).view, peer)
        self._writer = RingWriter(Segment.attach(outgoing).view, peer)
        self._spins = spins
        self._step = example_step()

    def send_all(self) -> None:
        """Sends `num_frames` as fast as they go."""
        try_push, step = self._writer.try_push, self._step
        for _ in range(self.num_frames):
            if not try_push(Kind.STEP, encode_step(1, step)):
                self._send_when_there_is_room()

    def receive_all(self) -> float:
        """Decodes `num_frames`; seconds from the first to the last."""
        left = self.num_frames
        begin = 0.0
        while left:
            messages = self._receive(256, STREAM_SPINS)
            begin = begin or time.perf_counter()
            for _, payload in messages:
                step = decode_step(payload)
            left -= len(messages)
            assert step.step == self._step.step
            self._reader.release()
        return time.perf_counter() - begin

    def ask(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            self._send_when_there_is_room()
            self._take_one()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def answer(self, count: int) -> None:
        """The other side of `ask`."""
        for _ in range(count):
            self._take_one()
            self._send_when_there_is_room()

    def _take_one(self) -> None:
        ((_, payload),) = self._receive(1, self._spins)
        decode_step(payload)
        self._reader.release()

    def _send_when_there_is_room(self) -> None:
        while not self._writer.try_push(Kind.STEP, encode_step(1, self._step)):
            if self._writer.arm_space():
                self._bell.wait(None)
            self._writer.disarm_space()

    def _receive(self, limit: int, spins: int) -> list[tuple[int, memoryview]]:
        reader = self._reader
        while True:
            for _ in range(spins + 1):
                messages = reader.read(limit)
                if messages:
                    return messages
            if reader.arm():
                self._bell.wait(None)
            reader.disarm()


class ZmqLink:
    """PUSH and PULL one way, and a PAIR for round trips; the engine binds.

    Args:
        folder: where the sockets are.
        is_engine: which side this is.
        message: the step as a msgspec Struct.
    """

    num_frames = ZMQ_FRAMES

    def __init__(self, folder: str, is_engine: bool, message: RowsStruct | ColumnsStruct) -> None:
        self._context = zmq.Context()
        self._stream = self._context.socket(zmq.PUSH if is_engine else zmq.PULL)
        self._pair = self._context.socket(zmq.PAIR)
        for name, socket in (("stream", self._stream), ("pair", self._pair)):
            (socket.bind if is_engine else socket.connect)(f"ipc://{folder}/{type(message).__name__}-{name}")
        self._step = message
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(type(message)).decode

    def send_all(self) -> None:
        """Sends `num_frames` as fast as they go."""
        send, encode, step = self._stream.send, self._encode, self._step
        for _ in range(self.num_frames):
            send(encode(step))

    def receive_all(self) -> float:
        """Decodes `num_frames`; seconds from the first to the last."""
        receive, decode = self._stream.recv, self._decode
        step = decode(receive())
        begin = time.perf_counter()
        for _ in range(self.num_frames - 1):
            step = decode(receive())
        assert step.step == self._step.step
        return time.perf_counter() - begin

    def ask(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            self._pair.send(self._encode(self._step))
            self._decode(self._pair.recv())
            seconds.append(time.perf_counter() - begin)
        return seconds

    def answer(self, count: int) -> None:
        """The other side of `ask`."""
        for _ in range(count):
            self._decode(self._pair.recv())
            self._pair.send(self._encode(self._step))


@dataclass
class Measured:
    """What one link did in each round.

    Attributes:
        frames_per_s: one way.
        round_trip_s: median of the round's trips.
    """

    frames_per_s: list[float] = field(default_factory=list)
    round_trip_s: list[float] = field(default_factory=list)


def run_child(is_engine: bool, folder: str, descriptors: list[int]) -> None:
    """One of the two processes; the frontend prints what it measured as JSON."""
    keep_to_half_of_the_processors(is_engine)
    requests, deltas, engine_bell, frontend_bell = descriptors
    if is_engine:
        ring = RingLink(requests, deltas, engine_bell, frontend_bell, ENGINE_SPINS)
    else:
        ring = RingLink(deltas, requests, frontend_bell, engine_bell, 0)
    step = example_step()
    links: dict[str, Link] = {
        "ring": ring,
        "rows": ZmqLink(folder, is_engine, rows_of(step)),
        "columns": ZmqLink(folder, is_engine, columns_of(step)),
    }
    measured = {name: Measured() for name in links}
    # The first round warms everything up and does not count.
    for number in range(ROUNDS + 1):
        for name in sorted(links, reverse=bool(number % 2)):
            if is_engine:
                serve_round(links[name])
            else:
                measure_round(links[name], measured[name] if number else Measured())
    if not is_engine:
        print(json.dumps({name: vars(result) for name, result in measured.items()}))


def serve_round(link: Link) -> None:
    """The engine's part of a round."""
    link.answer(100)
    link.send_all()
    link.answer(ROUND_TRIPS)


def measure_round(link: Link, result: Measured) -> None:
    """The frontend's part of a round."""
    # Brings both sides into step.
    link.ask(100)
    seconds = link.receive_all()
    result.frames_per_s.append((link.num_frames - 1) / seconds)
    result.round_trip_s.append(statistics.median(link.ask(ROUND_TRIPS)))


def keep_to_half_of_the_processors(first_half: bool) -> None:
    """Binds this process and the threads it starts from now on."""
    processors = sorted(os.sched_getaffinity(0))
    middle = len(processors) // 2
    if middle:
        os.sched_setaffinity(0, processors[:middle] if first_half else processors[middle:])


def measure() -> dict[str, Measured]:
    """Runs both processes to their end."""
    with ExitStack() as resources:
        folder = resources.enter_context(tempfile.TemporaryDirectory())
        descriptors = []
        for name in ("requests", "deltas"):
            segment = resources.enter_context(Segment.create(name, ring_bytes(RING_CAPACITY)))
            format_ring(segment.view, RING_CAPACITY)
            descriptors.append(segment.fd)
        bells = [resources.enter_context(Doorbell.create()) for _ in range(2)]
        descriptors += [bell.fileno() for bell in bells]
        command = [sys.executable, "-m", "loadtest.micro.ring", "--folder", folder]
        command += ["--descriptors", *map(str, descriptors)]
        engine = subprocess.Popen([*command, "--engine"], pass_fds=descriptors)
        resources.callback(engine.wait)
        resources.callback(engine.kill)
        frontend = subprocess.run(
            command, pass_fds=descriptors, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True
        )
    return {name: Measured(**result) for name, result in json.loads(frontend.stdout).items()}


def report(results: dict[str, Measured]) -> bool:
    """Prints medians and ratios; True when both bars are met."""
    ring, rows = results["ring"], results["rows"]
    print(
        f"{NUM_STREAMS} deltas a frame, {ROUNDS} rounds; {platform.machine()}, {os.cpu_count()} processors, "
        f"Python {platform.python_version()}, pyzmq {zmq.__version__}, msgspec {msgspec.__version__}"
    )
    for name, result in results.items():
        rate, trip = statistics.median(result.frames_per_s), statistics.median(result.round_trip_s)
        print(f"{name:8}{rate:12,.0f} frames/s one way{trip * 1e6:10.1f} us round trip")
    for name in ("rows", "columns"):
        peer = results[name]
        speedup = median_ratio(ring.frames_per_s, peer.frames_per_s)
        part = median_ratio(ring.round_trip_s, peer.round_trip_s)
        print(f"ring against {name}: {speedup:.2f} times the frames/s, {part:.3f} of the round trip")
    speedup = median_ratio(ring.frames_per_s, rows.frames_per_s)
    part = median_ratio(ring.round_trip_s, rows.round_trip_s)
    is_fast, is_short = speedup >= LEAST_SPEEDUP, part <= MOST_ROUND_TRIP
    print(f"one way:    {speedup:.2f} times as many frames (at least {LEAST_SPEEDUP}): {verdict(is_fast)}")
    print(f"round trip: {part:.3f} of the time (at most {MOST_ROUND_TRIP:.3f}): {verdict(is_short)}")
    return is_fast and is_short


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def verdict(is_met: bool) -> str:
    """The word for it."""
    return "PASS" if is_met else "FAIL"


def main() -> int:
    """Measures and reports; exit code 1 where a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--descriptors", type=int, nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.descriptors:
        run_child(arguments.engine, arguments.folder, arguments.descriptors)
        return 0
    return 0 if report(measure()) else 1


if __name__ == "__main__":
    sys.exit(main())
