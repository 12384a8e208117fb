"""Requests that must begin to run by some time, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, limits, prompt

from streamserve.engine.scheduler.deadlines import Deadlines
from streamserve.engine.scheduler.states import Request, State
from streamserve.messages import AddRequest, Finish
from streamserve.sampling import SamplingParams


def make_request(arrival: int, deadline_ns: int) -> Request:
    tokens, params = np.zeros(1, dtype=np.int32), SamplingParams(max_tokens=1)
    request = Request(0, AddRequest(arrival, tokens, 1, params, [], deadline_ns=deadline_ns))
    request.arrival = arrival
    return request


def test_without_deadlines_there_is_nothing_to_watch():
    harness = Harness()
    harness.add(prompt(4), max_tokens=1)
    assert harness.scheduler.next_deadline_ns is None
    assert harness.expire(2**62) == []
    assert len(harness.scheduler._deadlines) == 0
    harness.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_what_still_waits_at_its_deadline_is_over(policy):
    harness = Harness(limits(max_num_seqs=1), policy)
    runs = harness.add(prompt(4), max_tokens=5, deadline_ns=10, ignore_eos=True)
    harness.step()
    waits = [harness.add(prompt(4), max_tokens=5, deadline_ns=deadline) for deadline in (30, 10, 20)]
    assert harness.scheduler.next_deadline_ns == 10
    assert harness.expire(9) == []
    assert harness.expire(10) == [waits[1]]
    assert harness.scheduler.next_deadline_ns == 20
    assert harness.expire(1000) == [waits[2], waits[0]]
    assert harness.scheduler.next_deadline_ns is None
    assert harness.scheduler.statistics().expired == 3
    harness.run()
    assert harness.streams[runs].finish is Finish.LENGTH
    assert harness.started == [runs]


def test_one_that_comes_too_late_never_runs():
    harness = Harness()
    late = harness.add(prompt(4), deadline_ns=10)
    assert harness.expire(11) == [late]
    assert harness.step() is None


def test_a_preempted_request_has_begun_and_goes_on():
    harness = Harness(limits(num_blocks=6, block_size=4, max_model_len=24, max_num_batched_tokens=32))
    streams = [harness.add(prompt(7, seed), max_tokens=14, deadline_ns=10) for seed in range(3)]
    while not harness.scheduler.statistics().preemptions:
        harness.step()
    assert harness.scheduler.statistics().waiting > 0
    assert harness.expire(20) == [stream for stream in streams if stream not in harness.started]
    harness.run()
    harness.check()
    assert all(harness.streams[stream].tokens for stream in harness.started)


def test_an_aborted_request_does_not_expire():
    harness = Harness(limits(max_num_seqs=1))
    harness.add(prompt(4), max_tokens=2, ignore_eos=True)
    harness.step()
    gone = harness.add(prompt(4), deadline_ns=10)
    harness.abort(gone)
    assert harness.scheduler.next_deadline_ns is None
    assert harness.expire(20) == []


def test_expiry_of_the_first_in_the_queue_lets_the_next_one_in():
    harness = Harness(limits(num_blocks=8, max_model_len=128))
    harness.add(prompt(64, seed=1), max_tokens=20, ignore_eos=True)
    harness.step()
    big = harness.add(prompt(100, seed=2), max_tokens=10, deadline_ns=10)
    small = harness.add(prompt(4, seed=3), max_tokens=1)
    harness.step()
    assert harness.expire(10) == [big]
    harness.step()
    assert harness.streams[small].tokens
    harness.run()


def test_requests_that_began_are_not_kept_until_their_deadlines():
    deadlines = Deadlines()
    for arrival in range(10_000):
        request = make_request(arrival, 10**15)
        deadlines.push(request)
        if arrival % 10:
            request.move(State.RUNNING)
    assert len(deadlines) < 2 * 1000 + 100


@settings(deadline=None)
@given(data=st.data())
def test_against_a_list(data):
    deadlines, waiting, now_ns = Deadlines(), [], 0
    for arrival in range(data.draw(st.integers(0, 150))):
        action = data.draw(st.sampled_from(["push", "push", "push", "start", "pop"]))
        if action == "push":
            waiting.append(make_request(arrival, now_ns + data.draw(st.integers(1, 50))))
            deadlines.push(waiting[-1])
        elif action == "start" and waiting:
            waiting.pop(data.draw(st.integers(0, len(waiting) - 1))).move(State.RUNNING)
        elif action == "pop":
            now_ns += data.draw(st.integers(0, 20))
            due = [request for request in waiting if request.deadline_ns <= now_ns]
            assert deadlines.pop(now_ns) == sorted(due, key=lambda one: (one.deadline_ns, one.arrival))
            waiting = [request for request in waiting if request not in due]
        assert deadlines.next_ns == min((request.deadline_ns for request in waiting), default=None)
        assert len(deadlines) <= max(64, 2 * len(waiting) + 64)
