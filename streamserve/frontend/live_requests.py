"""The requests that somebody waits for, and what becomes of them when the engine that runs them ends.

All of them go to the next engine, in the order in which they came, each with the tokens that it has got so
far; to that engine it is as if it had preempted them. What it samples depends on a request's seed and
positions alone, so a stream goes on as it would have.

An engine may die of a request. What it ran at its end is under suspicion:

    ends in a row    then
    1                it goes on in company: most often the cause lies elsewhere
    2                a suspect: the next engine runs it alone, for PROBATION_TOKENS tokens
    3                it was alone the last time, so it is the cause, and is failed

An end does not count if the engine had brought a request so many tokens before it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from streamserve.errors import RequestPoisonous
from streamserve.frontend.mailbox import Mailbox, StreamTable
from streamserve.frontend.metrics import Metrics
from streamserve.frontend.sender import Sender
from streamserve.messages import PROBATION_TOKENS, AddRequest, Finish

logger = logging.getLogger(__name__)

NS_PER_S = 1e9
SUSPECT_AFTER, FAILED_AFTER = 2, 3
_CAUSE = (
    f"The engine died {FAILED_AFTER} times in a row while it ran this request, the last time with no other "
    "beside it; the request is not tried again."
)


class Source(Protocol):
    """What is asked of a generation here (streamserve.frontend.client.Generation)."""

    @property
    def prompt(self) -> Sequence[int] | npt.NDArray[np.int32]:
        """Token ids."""

    @property
    def tenant(self) -> str:
        """Whom its tokens are charged to."""

    @property
    def deadline_ns(self) -> int:
        """Wall clock, ns since 1970, by which it must have begun to run; 0 is no limit."""

    def as_add(
        self, stream: int, output: array[int], *, has_run: bool = False, is_suspect: bool = False
    ) -> AddRequest:
        """The engine's form of it."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One of them.

    Attributes:
        source: what was asked.
        mailbox: what has come of it.
        num_given: tokens of its output that the engine was given with it.
        is_running: the engine that there is has begun to run it.
        has_run: that one or an earlier one has.
        num_ends: engines that ended while they ran it, in a row.
    """

    source: Source
    mailbox: Mailbox
    num_given: int = 0
    is_running: bool = False
    has_run: bool = False
    num_ends: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether it may be the cause."""
        return self.num_ends >= SUSPECT_AFTER

    def lose(self, *, may_be_cause: bool) -> None:
        """The engine has ended."""
        if self.is_running:
            num_new = len(self.mailbox.output) - self.num_given
            if num_new >= PROBATION_TOKENS:
                self.num_ends = 1
            elif may_be_cause:
                self.num_ends += 1
        self.is_running = False


class LiveRequests:
    """All of a frontend.

    Args:
        streams: numbers them.
        sender: the request ring's only writer.
        metrics: where it is counted.
    """

    def __init__(self, streams: StreamTable, sender: Sender, metrics: Metrics) -> None:
        self._streams = streams
        self._sender = sender
        self._counters = metrics.recovery
        self._has_engine = False
        self._lost_s: float | None = None
        # That the engine has begun to run last.
        self._last_suspect: LiveRequest | None = None
        # By stream, in the order in which they came.
        self._requests: dict[int, LiveRequest] = {}

    def open(self, source: Source, num_top: int | None = None, num_prompt_top: int | None = None) -> Mailbox:
        """Takes a request in, which `send` then gives to the engine.

        Args:
            source: what is asked.
            num_top, num_prompt_top: see `Mailbox`.
        """
        mailbox = self._streams.open(num_top, num_prompt_top)
        self._requests[mailbox.stream] = LiveRequest(source, mailbox)
        return mailbox

    def send(self, mailbox: Mailbox) -> None:
        """Gives a request to the engine; if there is none, it waits for the next."""
        if self._has_engine:
            self._give(self._requests[mailbox.stream])

    def close(self, mailbox: Mailbox) -> None:
        """Nobody waits for it any more; the engine hears of it unless it knows."""
        self.abort(mailbox)
        del self._requests[mailbox.stream]
        self._streams.close(mailbox)

    def cancel(self, mailbox: Mailbox) -> None:
        """Ends it from this side; what has come so far stands."""
        if not mailbox.finish:
            self.abort(mailbox)
            self._streams.end(mailbox, Finish.ABORT)

    def abort(self, mailbox: Mailbox) -> None:
        """Tells the engine that nobody waits any more, unless it knows or is gone."""
        if self._has_engine and not mailbox.finish:
            self._sender.abort(mailbox.stream)

    def begin(self, streams: Sequence[int], moment_ns: int) -> None:
        """The engine runs them, from that moment of the monotonic clock on."""
        for stream in streams:
            request = self._requests.get(stream)
            if request is not None:
                request.is_running = request.has_run = True
                if request.is_suspect:
                    self._last_suspect = request
                # One that has got a token began before this engine.
                if not request.mailbox.output:
                    request.mailbox.began_s = moment_ns / NS_PER_S

    def meet_engine(self, now_s: float) -> int:
        """There is a new engine: gives it all of them; how many there were."""
        self._has_engine = True
        if self._lost_s is not None:
            self._counters.outage.observe(now_s - self._lost_s)
            self._lost_s = None
        waiting = [request for request in self._requests.values() if not request.mailbox.has_ended]
        for request in waiting:
            self._give(request)
        num_suspects = sum(request.is_suspect for request in waiting)
        if num_suspects:
            self._counters.suspected.add(num_suspects)
            logger.warning(
                "%d requests ran when several engines in a row died; each runs alone for a while",
                num_suspects,
            )
        self._counters.continued.add(sum(request.has_run for request in waiting))
        return len(waiting)

    def leave_engine(self) -> None:
        """There is no engine any more, and none will come."""
        self._has_engine = False

    def lose_engine(self, now_s: float) -> None:
        """The engine has ended, and another will come. All that it sent must have been handed on."""
        self._has_engine = False
        self._lost_s = now_s
        last_suspect, self._last_suspect = self._last_suspect, None
        for request in list(self._requests.values()):
            # A suspect that ran before another came through, even if its tokens did not get here.
            request.lose(may_be_cause=not request.is_suspect or request is last_suspect)
            if request.num_ends >= FAILED_AFTER and not request.mailbox.has_ended:
                self._condemn(request)

    def expire(self, now_ns: int) -> None:
        """Ends those whose time in the queue has run out while there is no engine that would."""
        for request in list(self._requests.values()):
            is_due = 0 < request.source.deadline_ns <= now_ns
            if is_due and not request.has_run and not request.mailbox.has_ended:
                self._streams.end(request.mailbox, Finish.EXPIRED)

    def _condemn(self, request: LiveRequest) -> None:
        logger.error(
            "engines died of a request, which is failed: %d prompt tokens, %d of output, key %r",
            len(request.source.prompt),
            len(request.mailbox.output),
            request.source.tenant,
        )
        self._counters.poisonous.add()
        request.mailbox.fail(RequestPoisonous(_CAUSE))

    def _give(self, request: LiveRequest) -> None:
        mailbox = request.mailbox
        if not mailbox.output:
            # What the last engine told of the prompt, this one tells once more.
            mailbox.drop_prompt_logprobs()
        request.num_given = len(mailbox.output)
        self._sender.add(
            request.source.as_add(
                mailbox.stream, mailbox.output, has_run=request.has_run, is_suspect=request.is_suspect
            )
        )
