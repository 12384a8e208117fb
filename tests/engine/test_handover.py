"""A frontend that dies and another on its rings: neither the engine nor the new one takes old for new."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_harness import EPOCH, CoreHarness
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_harness import alone, limits, prompt

from streamserve.ipc.ring import RingReader, RingWriter
from streamserve.messages import AddRequest, Kind, decode_json, encode_add, encode_handover
from streamserve.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "push_requests.py"

SIZES = limits(max_num_batched_tokens=24, num_blocks=30, block_size=4, max_model_len=100)
PLAIN = SamplingParams(max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
WIDE = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=20, prompt_logprobs=20)


class Mortals(CoreHarness):
    """A core whose frontends can die.

    Attributes:
        incarnations: how often each of them has been replaced.
        heeds: whether it has had its HELLO.
    """

    def __init__(self, num_frontends: int = 2, **options) -> None:
        super().__init__(num_frontends, **{"limits": SIZES, **options})
        self.incarnations = [0] * num_frontends
        self.heeds = [False] * num_frontends
        for outbox in self.rings.outboxes:
            outbox.hello({"max_model_len": SIZES.max_model_len})
        self.read_all()

    def die(self, frontend: int) -> bool:
        """Another takes its place, and counts its streams anew; False if the supervisor finds no room."""
        channel = self.channels[frontend]
        supervisor = RingWriter(channel.requests.view, self.engine_bell)
        handover = encode_handover(EPOCH, self.incarnations[frontend] + 1)
        if not supervisor.try_push(Kind.HANDOVER, handover):
            return False
        self.incarnations[frontend] += 1
        self.heeds[frontend] = False
        self.streams[frontend] = {}
        self.replies[frontend] = []
        channel.writer = RingWriter(channel.requests.view, self.engine_bell)
        channel.reader = RingReader(channel.deltas.view, self.engine_bell)
        return True

    def frame(self, stream: int, tokens: list[int]) -> bytes:
        """An ADD frame."""
        array = np.array(tokens, dtype=np.int32)
        hashes = self.hasher.chain(array, self.hasher.root(b""))
        return b"".join(encode_add(EPOCH, AddRequest(stream, array, len(tokens), PLAIN, hashes)))

    def push(self, frontend: int, kind: Kind, parts: list[Any]) -> None:
        writer = self.channels[frontend].writer
        if sum(map(len, parts)) <= writer.max_message:
            super().push(frontend, kind, parts)
            return
        fragments = writer.begin(kind, parts)
        while not fragments.advance():
            self.core.admit()

    def _take(self, frontend: int, kind: int, payload: memoryview) -> None:
        if kind == Kind.HELLO:
            hello = decode_json(payload)
            assert hello["max_model_len"] == SIZES.max_model_len
            self.heeds[frontend] |= hello["incarnation"] == self.incarnations[frontend]
        elif self.heeds[frontend]:
            super()._take(frontend, kind, payload)

    def check(self) -> None:
        """All that lives has what it would have alone, and there is nothing else."""
        self.scheduler.check_integrity()
        for streams in self.streams:
            for stream in streams.values():
                if not stream.aborted:
                    wanted = alone(stream.prompt, len(stream.prompt), stream.params, SIZES)
                    assert (stream.tokens, stream.finish) == wanted
        statistics = self.core.statistics()
        assert (statistics["running"], statistics["waiting"]) == (0, 0)
        assert statistics["free_blocks"] == statistics["num_blocks"]


@pytest.mark.parametrize("depth", [1, 2])
def test_its_requests_are_dropped_and_the_others_go_on(depth, caplog):
    with Mortals(depth=depth) as harness:
        for frontend, seed in ((0, 1), (0, 2), (1, 3)):
            harness.add(frontend, prompt(5, seed), LONG)
        harness.step()
        assert harness.core.statistics()["running"] == 3
        with caplog.at_level(logging.WARNING):
            assert harness.die(0)
            harness.step()
        assert "frontend 0 is gone, and 2 requests with it" in caplog.text
        assert harness.core.statistics()["running"] == 1
        assert harness.heeds == [True, True]
        harness.run()
        harness.check()
        assert len(harness.streams[1][0].tokens) == 40


def test_one_that_was_gone_when_the_engine_started_is_no_news(caplog):
    with Mortals() as harness:
        for incarnation in (1, 2):
            # While there is no engine, for the next one, which learns of the last of them when it starts.
            harness.push(0, Kind.HANDOVER, encode_handover(EPOCH, incarnation))
        harness.rings.outboxes[0].reset(2)
        harness.incarnations[0] = 2
        harness.add(0, prompt(5), LONG)
        harness.run()
        assert "is gone" not in caplog.text
        assert len(harness.streams[0][0].tokens) == 40


def test_what_it_asked_for_last_is_never_begun():
    with Mortals() as harness:
        harness.add(0, prompt(5), LONG)
        assert harness.die(0)
        assert not harness.step()
        assert harness.core.statistics()["prompt_tokens"] == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_stream_number_is_another_stream(depth):
    with Mortals(depth=depth) as harness:
        harness.add(0, prompt(9, 1), LONG)
        harness.step()
        # Tokens of the old stream 0 lie in the ring, and a step of it may be in flight.
        assert harness.die(0)
        harness.core.step()
        harness.read(0)
        assert harness.heeds[0]
        harness.add(0, prompt(5, 2), PLAIN)
        harness.run()
        harness.check()


def test_a_hello_for_the_one_before_is_not_heeded():
    with Mortals() as harness:
        assert harness.die(0)
        harness.core.step()
        # It dies before it has read anything.
        assert harness.die(0)
        harness.read(0)
        assert not harness.heeds[0]
        harness.step()
        assert harness.heeds[0]


def test_what_waits_for_room_is_forgotten():
    with Mortals(capacity=1 << 11) as harness:
        for seed in range(3):
            harness.add(0, prompt(20, seed), WIDE)
        for _ in range(60):
            harness.core.step()
        (outbox, _) = harness.rings.outboxes
        assert outbox.has_backlog
        assert harness.die(0)
        harness.core.step()
        while not harness.heeds[0]:
            outbox.flush()
            harness.read(0)
        harness.add(0, prompt(5), WIDE)
        harness.run()
        harness.check()


def test_a_hello_waits_for_room_as_well():
    with Mortals(capacity=1 << 11) as harness:
        (outbox, _) = harness.rings.outboxes
        while not outbox.has_backlog:
            outbox.reply(1, {})
        assert harness.die(0)
        harness.core.step()
        assert outbox.has_backlog
        assert outbox.wait_for_room(), "the engine may sleep"
        harness.read(0)
        assert not harness.heeds[0]
        assert harness.engine_bell.wait(60)
        outbox.flush()
        harness.read(0)
        assert harness.heeds[0]
        assert not harness.replies[0]


def test_a_prompt_that_was_cut_in_the_middle_is_no_request():
    with Mortals(capacity=1 << 10) as harness:
        fragments = harness.channels[0].writer.begin(Kind.ADD, [bytes(1 << 13)])
        for _ in range(3):
            assert not fragments.advance()
            harness.core.admit()
        assert harness.die(0)
        harness.step()
        # The next one in pieces is whole.
        harness.add(0, prompt(90), PLAIN)
        harness.run()
        harness.check()


def test_an_answer_for_the_one_before_does_not_reach_its_successor():
    with Mortals() as harness:
        harness.call(0, 7, {"method": "relay", "body": "?"})
        harness.step()
        ((_, question),) = harness.relays[1]
        assert harness.die(0)
        body = {"method": "relay_reply", "to": question["origin"], "call_id": 7, "body": "!"}
        harness.call(1, 1, body)
        harness.call(0, 7, {"method": "ping"})
        harness.run()
        ((call_id, reply),) = harness.replies[0]
        assert call_id == 7
        assert reply["ok"]


NUM_LIVES, NUM_PROMPTS = 30, 12


def test_processes_killed_in_the_middle_of_long_prompts(tmp_path):
    """Requests longer than the ring, under the same numbers in each life."""
    sizes = limits(num_blocks=40_000, max_model_len=40_000, max_num_batched_tokens=512)
    chance = random.Random(7)
    num_cut = 0
    with Mortals(1, limits=sizes, capacity=1 << 14) as harness:
        (channel,), (inbox,) = harness.channels, harness.rings.inboxes
        descriptors = (channel.requests.fd, harness.engine_bell.fileno(), channel.bell.fileno())
        for life in range(NUM_LIVES):
            files = [tmp_path / f"{life}-{stream}" for stream in range(NUM_PROMPTS)]
            for stream, file in enumerate(files):
                file.write_bytes(harness.frame(stream, prompt(chance.randrange(5_000, 15_000), life)))
            child = subprocess.Popen(
                [sys.executable, str(PROGRAM), *map(str, (*descriptors, int(Kind.ADD), *files))],
                pass_fds=descriptors,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            try:
                for _ in range(chance.randrange(1, 20)):
                    if harness.core.statistics()["waiting"] == NUM_PROMPTS:
                        break
                    if inbox.arm():
                        assert harness.engine_bell.wait(60)
                    inbox.disarm()
                    harness.core.admit()
            finally:
                child.kill()
                child.wait()
            while not harness.die(0):
                harness.core.admit()
            num_cut += harness.core.statistics()["waiting"] < NUM_PROMPTS
            harness.core.admit()
            assert not harness.scheduler.has_work
            harness.read(0)
            assert harness.heeds[0]
            harness.add(0, prompt(50, life), PLAIN)
            harness.run()
            (stream,) = harness.streams[0].values()
            assert (stream.tokens, stream.finish) == alone(stream.prompt, 50, PLAIN, sizes)
        harness.scheduler.check_integrity()
    # How many it hits depends on how the machine shares its processors.
    assert num_cut > NUM_LIVES / 6


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 20),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 20]),
    prompt_logprobs=st.sampled_from([None, None, None, 20]),
)
FRONTENDS = st.integers(0, 1)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), FRONTENDS, st.integers(1, 60), st.integers(0, 3), PARAMS),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("read"), FRONTENDS),
    st.tuples(st.just("die"), FRONTENDS),
)


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=30, max_size=90),
    capacity=st.sampled_from([1 << 11, 1 << 14]),
    depth=st.sampled_from([1, 2]),
)
def test_frontends_that_die_whenever_they_like(actions, capacity, depth):
    """Full rings and messages in pieces among them; all streams have the same numbers again and again."""
    with Mortals(capacity=capacity, depth=depth) as harness:
        for action in actions:
            match action:
                case "add", frontend, length, seed, params:
                    if harness.heeds[frontend]:
                        harness.add(frontend, prompt(length, seed), params)
                        harness.core.admit()
                case "step", count:
                    for _ in range(count):
                        harness.core.step()
                case "read", frontend:
                    harness.read(frontend)
                case "die", frontend:
                    has_backlog = harness.rings.outboxes[frontend].has_backlog
                    event(f"streams: {bool(harness.streams[frontend])}, backlog: {has_backlog}")
                    assert harness.die(frontend)
                    harness.core.admit()
        harness.run()
        assert harness.heeds == [True, True]
        harness.check()
