"""One suite for every queue, then what sets them apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.engine.scheduler.policy import FcfsQueue, PriorityQueue, RequestQueue
from streamserve.engine.scheduler.states import Request
from streamserve.messages import AddRequest
from streamserve.sampling import SamplingParams

QUEUES = [FcfsQueue, PriorityQueue]


def make_request(arrival: int, priority: int = 0) -> Request:
    tokens = np.zeros(1, dtype=np.int32)
    add = AddRequest(arrival, 0, tokens, 1, SamplingParams(max_tokens=1), [], priority)
    request = Request(0, add)
    request.arrival = arrival
    return request


def drain(queue: RequestQueue) -> list[Request]:
    drained = []
    while (request := queue.peek()) is not None:
        queue.remove(request)
        drained.append(request)
    return drained


@pytest.mark.parametrize("make", QUEUES)
def test_an_empty_queue(make):
    queue = make()
    assert queue.peek() is None
    assert len(queue) == 0
    assert list(queue) == []
    with pytest.raises((KeyError, IndexError)):
        queue.remove(make_request(1))


@pytest.mark.parametrize("make", QUEUES)
def test_equals_come_out_as_they_came(make):
    queue = make()
    requests = [make_request(arrival) for arrival in range(5)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[2])
    assert len(queue) == 4
    assert list(queue) == [requests[at] for at in (0, 1, 3, 4)]
    assert drain(queue) == [requests[at] for at in (0, 1, 3, 4)]


@pytest.mark.parametrize("make", QUEUES)
def test_preempted_ones_go_to_the_head(make):
    queue = make()
    first, second, third = (make_request(arrival) for arrival in range(3))
    queue.push(third)
    # The latest is preempted first.
    queue.restore(second)
    queue.restore(first)
    assert drain(queue) == [first, second, third]


@pytest.mark.parametrize("make", QUEUES)
@given(data=st.data())
def test_against_a_list(make, data):
    queue, model = make(), []
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
        if make is PriorityQueue:
            model.sort(key=lambda request: (request.priority, request.arrival))
        assert list(queue) == model
        assert queue.peek() is (model[0] if model else None)


def test_fcfs_does_not_look_at_priority():
    queue = FcfsQueue()
    requests = [make_request(0, 5), make_request(1, -5)]
    for request in requests:
        queue.push(request)
    assert drain(queue) == requests


def test_smaller_priority_comes_first():
    queue = PriorityQueue()
    low, high, also_high = make_request(0, 5), make_request(1, -5), make_request(2, -5)
    for request in (low, also_high, high):
        queue.push(request)
    assert drain(queue) == [high, also_high, low]
