"""A request's cold record, and its life as a table.

    FINISHED_EXPIRED
              ▲
              │
    add ─► WAITING ─► RUNNING ─► FINISHED_STOPPED (eos, stop id) or FINISHED_LENGTH
              │        │  ▲ │
              │        ▼  │ │
              │     PREEMPTED
              │        │    │
              └────────┴────┴──► FINISHED_ABORTED

Two rules for this file: every move is in `MOVES`, and a move that is not raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from streamserve.messages import AddRequest


class State(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH = auto()
    FINISHED_ABORTED = auto()
    FINISHED_EXPIRED = auto()

    @property
    def is_queued(self) -> bool:
        """Whether the request waits for a slot."""
        return self in (State.WAITING, State.PREEMPTED)


MOVES: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.WAITING: frozenset({State.RUNNING, State.FINISHED_ABORTED, State.FINISHED_EXPIRED}),
        State.RUNNING: frozenset(
            {State.PREEMPTED, State.FINISHED_STOPPED, State.FINISHED_LENGTH, State.FINISHED_ABORTED}
        ),
        State.PREEMPTED: frozenset({State.RUNNING, State.FINISHED_ABORTED}),
        State.FINISHED_STOPPED: frozenset(),
        State.FINISHED_LENGTH: frozenset(),
        State.FINISHED_ABORTED: frozenset(),
        State.FINISHED_EXPIRED: frozenset(),
    }
)


class IllegalMove(Exception):
    """The engine tried to take a request where it cannot go from its state: a bug of ours."""


class Request:
    """What is kept of a request outside the arrays: all of it while it waits, little while it runs.

    Args:
        frontend: index of the frontend it came from.
        add: the request as it came.

    Attributes:
        tokens: int32[n], all known tokens while the request waits; empty while it runs (the table has them).
        num_prompt: how many of them are prompt.
        num_added: how many tokens it came with; more than `num_prompt` if an engine before this one
            generated some.
        has_run: an engine before this one ran it.
        is_suspect: it is to run alone for a while (streamserve.engine.scheduler.quarantine).
        hashes: hash of each full block known so far: the prompt's, then those that generation completed.
        priority: smaller is more important; the scheduler makes it 0 where the policy does not heed it.
        arrival: place in the order of arrival; the scheduler gives it.
        next_prompt_logprob: position of the first prompt token whose log probabilities are still to be
            reported; `num_prompt` when there is none, as in requests that did not ask.
        num_cached: prompt tokens found in the prefix cache at its first admission; None before that.
        slot: its row in the arrays while it runs, else None.
    """

    __slots__ = (
        "_state",
        "arrival",
        "cache_salt",
        "deadline_ns",
        "frontend",
        "has_run",
        "hashes",
        "is_suspect",
        "next_prompt_logprob",
        "num_added",
        "num_cached",
        "num_prompt",
        "params",
        "priority",
        "slot",
        "stream",
        "tenant",
        "tokens",
    )

    def __init__(self, frontend: int, add: AddRequest) -> None:
        self.frontend = frontend
        self.stream = add.stream
        self.params = add.params
        self.priority = add.priority
        self.deadline_ns = add.deadline_ns
        self.tenant = add.tenant
        self.cache_salt = add.cache_salt
        self.num_prompt = add.num_prompt
        self.num_added = len(add.tokens)
        self.has_run = add.has_run
        self.is_suspect = add.is_suspect
        self.tokens: npt.NDArray[np.int32] = add.tokens
        self.hashes: list[bytes] = list(add.block_hashes)
        self.arrival = 0
        self.next_prompt_logprob = add.num_prompt if add.params.prompt_logprobs is None else 1
        self.num_cached: int | None = None
        self.slot: int | None = None
        self._state = State.WAITING

    @property
    def num_reusable(self) -> int:
        """How many leading tokens need not be computed if their K and V are in the cache.

        Of those behind, the first has logits that are wanted: to sample from, or for a prompt's log
        probabilities.
        """
        if self.next_prompt_logprob < self.num_prompt:
            return self.next_prompt_logprob - 1
        return len(self.tokens) - 1

    @property
    def state(self) -> State:
        """Where the request is in its life; `move` changes it."""
        return self._state

    def move(self, state: State) -> None:
        """Goes on to `state`.

        Raises:
            IllegalMove: the lifecycle has no such move; nothing has changed.
        """
        if state not in MOVES[self._state]:
            raise IllegalMove(
                f"stream {self.stream} of frontend {self.frontend}: {self._state.name} to {state.name}"
            )
        self._state = state
