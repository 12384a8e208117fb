"""The lifecycle table, walked."""

from __future__ import annotations

import numpy as np
import pytest

from streamserve.engine.scheduler.states import MOVES, IllegalMove, Request, State
from streamserve.messages import AddRequest
from streamserve.sampling import SamplingParams

# The shortest way from WAITING into each state.
WAYS: dict[State, list[State]] = {
    State.WAITING: [],
    State.RUNNING: [State.RUNNING],
    State.PREEMPTED: [State.RUNNING, State.PREEMPTED],
    State.FINISHED_STOPPED: [State.RUNNING, State.FINISHED_STOPPED],
    State.FINISHED_LENGTH: [State.RUNNING, State.FINISHED_LENGTH],
    State.FINISHED_ABORTED: [State.FINISHED_ABORTED],
    State.FINISHED_EXPIRED: [State.FINISHED_EXPIRED],
}


def request_in(state: State) -> Request:
    tokens = np.arange(3, dtype=np.int32)
    request = Request(1, AddRequest(5, tokens, 3, SamplingParams(max_tokens=1), []))
    for move in WAYS[state]:
        request.move(move)
    assert request.state is state
    return request


def test_every_state_is_in_the_table():
    assert set(MOVES) == set(State) == set(WAYS)


@pytest.mark.parametrize("begin", State)
@pytest.mark.parametrize("end", State)
def test_every_move(begin, end):
    request = request_in(begin)
    if end in MOVES[begin]:
        request.move(end)
        assert request.state is end
    else:
        with pytest.raises(IllegalMove, match=f"{begin.name} to {end.name}"):
            request.move(end)
        assert request.state is begin


def test_finished_is_final():
    for state in State:
        assert state.name.startswith("FINISHED") == (not MOVES[state])


def test_only_what_waits_is_queued():
    assert {state for state in State if state.is_queued} == {State.WAITING, State.PREEMPTED}
