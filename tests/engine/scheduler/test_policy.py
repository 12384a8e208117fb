"""One suite for every queue, then what sets them apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import limits

from streamserve.engine.scheduler.policy import (
    OUTPUT_TOKEN_WEIGHT,
    PROMPT_TOKEN_WEIGHT,
    FairQueue,
    RequestQueue,
    make_queue,
)
from streamserve.engine.scheduler.states import Request
from streamserve.engine.scheduler.table import RequestTable
from streamserve.messages import AddRequest
from streamserve.sampling import SamplingParams

POLICIES = ["fcfs", "priority", "fair"]
TABLE_LIMITS = limits(max_num_seqs=3)


def queue_of(policy: str) -> RequestQueue:
    return make_queue(policy, RequestTable(TABLE_LIMITS))


def make_request(
    arrival: int, priority: int = 0, tenant: str = "", num_prompt: int = 1, *, has_run: bool = False
) -> Request:
    tokens = np.zeros(num_prompt, dtype=np.int32)
    params = SamplingParams(max_tokens=10)
    add = AddRequest(arrival, tokens, num_prompt, params, [], priority, tenant=tenant, has_run=has_run)
    request = Request(0, add)
    request.arrival = arrival
    return request


def drain(queue: RequestQueue) -> list[Request]:
    drained = []
    while (request := queue.peek()) is not None:
        queue.remove(request)
        drained.append(request)
    return drained


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_queue(policy):
    queue = queue_of(policy)
    assert queue.peek() is None
    assert len(queue) == 0
    assert list(queue) == []
    with pytest.raises((KeyError, IndexError)):
        queue.remove(make_request(1))


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_come_out_as_they_came(policy):
    queue = queue_of(policy)
    requests = [make_request(arrival) for arrival in range(5)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[2])
    assert len(queue) == 4
    assert list(queue) == [requests[at] for at in (0, 1, 3, 4)]
    assert drain(queue) == [requests[at] for at in (0, 1, 3, 4)]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_an_earlier_engine_ran_goes_before_what_none_has(policy):
    queue = queue_of(policy)
    # As if one frontend came after the other.
    requests = [
        make_request(arrival, tenant="ab"[arrival % 2], has_run=arrival in (1, 3)) for arrival in range(5)
    ]
    for request in requests:
        queue.push(request)
    queue.remove(requests[2])
    preempted = make_request(-1)
    queue.restore(preempted)
    assert len(queue) == 5
    assert set(queue) == {preempted, *(requests[at] for at in (0, 1, 3, 4))}
    drained = drain(queue)
    assert set(drained[:3]) == {preempted, requests[1], requests[3]}
    assert drained.index(requests[1]) < drained.index(requests[3])
    assert set(drained[3:]) == {requests[0], requests[4]}


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_ones_go_to_the_head(policy):
    queue = queue_of(policy)
    first, second, third = (make_request(arrival) for arrival in range(3))
    queue.push(third)
    # The latest is preempted first.
    queue.restore(second)
    queue.restore(first)
    assert drain(queue) == [first, second, third]


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None)
@given(data=st.data())
def test_against_a_list(policy, data):
    queue, model = queue_of(policy), []
    for arrival in range(data.draw(st.integers(0, 30))):
        if model and data.draw(st.booleans()):
            request = data.draw(st.sampled_from(model))
            model.remove(request)
            queue.remove(request)
            if data.draw(st.booleans()):
                model.insert(0, request)
                queue.restore(request)
        else:
            request = make_request(arrival, data.draw(st.integers(-1, 1)))
            model.append(request)
            queue.push(request)
        if policy == "priority":
            model.sort(key=lambda request: (request.priority, request.arrival))
        assert list(queue) == model
        assert queue.peek() is (model[0] if model else None)


def test_fcfs_does_not_look_at_priority():
    queue = queue_of("fcfs")
    requests = [make_request(0, 5), make_request(1, -5)]
    for request in requests:
        queue.push(request)
    assert drain(queue) == requests


def test_smaller_priority_comes_first():
    queue = queue_of("priority")
    low, high, also_high = make_request(0, 5), make_request(1, -5), make_request(2, -5)
    for request in (low, also_high, high):
        queue.push(request)
    assert drain(queue) == [high, also_high, low]


def test_an_unknown_policy_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="random"):
        queue_of("random")


# Fair shares


class FairModel:
    """The queue with its table, and the same accounts kept in the plainest way: one token at a time."""

    def __init__(self) -> None:
        self.table = RequestTable(TABLE_LIMITS)
        self.queue = FairQueue(self.table)
        self.waiting: dict[str, list[Request]] = {}
        self.counters: dict[str, int] = {}
        self.preempted: list[Request] = []
        self.running: list[Request] = []
        self.last: str | None = None

    def push(self, request: Request) -> None:
        waiting = self.waiting.setdefault(request.tenant, [])
        if not waiting:
            others = [self.counters[tenant] for tenant, requests in self.waiting.items() if requests]
            floor = min(others) if others else self.counters.get(self.last, 0)
            self.counters[request.tenant] = max(self.counters.get(request.tenant, 0), floor)
        waiting.append(request)
        self.queue.push(request)

    def first(self) -> Request | None:
        if self.preempted:
            return self.preempted[0]
        heads = [requests[0] for requests in self.waiting.values() if requests]
        return min(heads, key=lambda head: (self.counters[head.tenant], head.arrival), default=None)

    def drop(self, request: Request) -> None:
        if request in self.preempted:
            self.preempted.remove(request)
        else:
            self.waiting[request.tenant].remove(request)
            if not self.waiting[request.tenant]:
                self.last = request.tenant
        self.queue.remove(request)

    def admit(self) -> None:
        self.queue.update()
        request = self.queue.peek()
        assert request is self.first()
        if request is None or not self.table.num_free:
            return
        is_first = request not in self.preempted
        self.drop(request)
        self.table.join(request, 1)
        self.queue.seated(request, request.num_prompt if is_first else 0)
        self.counters[request.tenant] += PROMPT_TOKEN_WEIGHT * request.num_prompt * is_first
        self.running.append(request)

    def decode(self) -> None:
        for request in self.running:
            self.table.num_tokens[request.slot] += 1
            self.counters[request.tenant] += OUTPUT_TOKEN_WEIGHT

    def stop(self, request: Request, *, preempt: bool) -> None:
        self.running.remove(request)
        tokens = self.table.known_tokens(request.slot)
        self.table.capacity[request.slot] = 0
        self.queue.left(request.slot)
        self.table.leave(request.slot)
        if preempt:
            request.tokens = tokens
            self.preempted.insert(0, request)
            self.queue.restore(request)


@settings(deadline=None)
@given(data=st.data())
def test_fair_against_plain_accounts(data):
    model = FairModel()
    tenants = [f"tenant {number}" for number in range(data.draw(st.sampled_from([1, 2, 12])))]
    for arrival in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["push", "push", "admit", "decode", "stop", "preempt", "drop"]))
        queued = list(model.queue)
        if action == "push":
            tenant = data.draw(st.sampled_from(tenants))
            model.push(make_request(arrival, tenant=tenant, num_prompt=data.draw(st.integers(1, 20))))
        elif action == "admit":
            model.admit()
        elif action == "decode":
            model.decode()
        elif action == "drop" and queued:
            model.drop(data.draw(st.sampled_from(queued)))
        elif action in ("stop", "preempt") and model.running:
            model.stop(data.draw(st.sampled_from(model.running)), preempt=action == "preempt")
        assert set(model.queue) == {
            *model.preempted,
            *(one for waiting in model.waiting.values() for one in waiting),
        }
        assert len(model.queue) == len(list(model.queue))
    model.queue.update()
    for tenant, counter in model.counters.items():
        assert model.queue.counter(tenant) == counter
    assert model.queue.peek() is model.first()


def test_fair_tenants_take_turns():
    queue = queue_of("fair")
    flood = [make_request(arrival, tenant="flood") for arrival in range(4)]
    for request in flood:
        queue.push(request)
    light = make_request(9, tenant="light")
    queue.push(light)
    # Nobody was served yet, so it is first come, first served; then it is the other's turn.
    assert queue.peek() is flood[0]
    seat(queue, flood[0])
    assert queue.peek() is light


def test_fair_nobody_saves_up_by_staying_away():
    model = FairModel()
    for arrival in range(3):
        model.push(make_request(arrival, tenant="old", num_prompt=50))
    model.admit()
    model.admit()
    assert model.queue.counter("old") == 100
    model.push(make_request(7, tenant="new"))
    assert model.queue.counter("new") == 100


def test_fair_nobody_saves_up_while_nothing_waits():
    model = FairModel()
    model.push(make_request(0, tenant="old", num_prompt=50))
    model.admit()
    model.decode()
    model.push(make_request(1, tenant="new"))
    assert model.queue.counter("new") == 50 + OUTPUT_TOKEN_WEIGHT


def seat(queue: FairQueue, request: Request) -> None:
    queue.remove(request)
    queue._table.join(request, 1)
    queue.seated(request, request.num_prompt)
