"""Requests that may have ended the engines before this one run alone, until they have shown that they can.

When an engine dies, all that it ran may be the cause. Frontends tell which of its requests has now been there
several times (`AddRequest.is_suspect`). With nobody beside it, an end of this engine says for sure which one
it was, and a few tokens say that it was none.

    waiting as a suspect ──nobody runs──► on trial ──PROBATION_TOKENS tokens──► as any other
                                             └─the engine ends──► the frontend fails it
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from streamserve.engine.scheduler.policy import RequestQueue
from streamserve.engine.scheduler.states import Request
from streamserve.engine.scheduler.table import RequestTable
from streamserve.messages import PROBATION_TOKENS


class QuarantineQueue(RequestQueue):
    """The queue of a policy, behind the suspects: as long as any of them waits, nobody else comes in.

    Args:
        inner: the policy's.
        table: the running requests.

    Attributes:
        on_trial: the suspect that runs, alone.
    """

    def __init__(self, inner: RequestQueue, table: RequestTable) -> None:
        self.heeds_priority = inner.heeds_priority
        self.on_trial: Request | None = None
        self._inner = inner
        self._table = table
        self._suspects: OrderedDict[Request, None] = OrderedDict()

    @property
    def is_crowded(self) -> bool:
        """Whether a suspect waits who is to be the next to come in.

        Before the next `peek` all that run have to give way, and steps in flight to end, also those of
        requests that are gone: an engine that ends in one of them did not end for the suspect.
        """
        return bool(self._suspects) and self.on_trial is None

    def acquit(self, num_in_flight: int) -> None:
        """Ends the trial if there are enough tokens.

        Args:
            num_in_flight: steps that are not settled.
        """
        request = self.on_trial
        if request is not None and request.slot is not None:
            num_new = int(self._table.num_tokens[request.slot]) - request.num_added - num_in_flight
            if num_new >= PROBATION_TOKENS:
                request.is_suspect = False
                self.on_trial = None

    def push(self, request: Request) -> None:
        """See `RequestQueue`."""
        if request.is_suspect:
            self._suspects[request] = None
        else:
            self._inner.push(request)

    def restore(self, request: Request) -> None:
        """See `RequestQueue`. One on trial is alone, and gives way to nobody."""
        self._inner.restore(request)

    def peek(self) -> Request | None:
        """See `RequestQueue`."""
        if self.on_trial is not None:
            return None
        if self._suspects:
            return next(iter(self._suspects))
        return self._inner.peek()

    def remove(self, request: Request) -> None:
        """See `RequestQueue`."""
        if request in self._suspects:
            del self._suspects[request]
        else:
            self._inner.remove(request)

    def update(self) -> None:
        """See `RequestQueue`."""
        self._inner.update()

    def seated(self, request: Request, num_tokens: int) -> None:
        """See `RequestQueue`."""
        if request.is_suspect:
            self.on_trial = request
        self._inner.seated(request, num_tokens)

    def left(self, slot: int) -> None:
        """See `RequestQueue`."""
        if self.on_trial is not None and self.on_trial.slot == slot:
            self.on_trial = None
        self._inner.left(slot)

    def __len__(self) -> int:
        return len(self._suspects) + len(self._inner)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._suspects, self._inner)
