"""In which order waiting requests get their turn."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from streamserve.engine.scheduler.states import Request


class RequestQueue(Protocol):
    """The waiting requests. None of them is overtaken by one behind it: only the first is ever admitted."""

    def push(self, request: Request) -> None:
        """A new request waits."""

    def restore(self, request: Request) -> None:
        """A preempted request waits; it goes before all that have not run yet (and are no more important)."""

    def peek(self) -> Request | None:
        """The request whose turn is next; None when nothing waits."""

    def remove(self, request: Request) -> None:
        """`request`, wherever it stands, waits no more (admitted or aborted)."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue:
    """First come, first served. Every operation is O(1)."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Request, None] = OrderedDict()

    def push(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._waiting[request] = None

    def restore(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)

    def peek(self) -> Request | None:
        """See `RequestQueue`."""
        return next(iter(self._waiting), None)

    def remove(self, request: Request) -> None:
        """See `RequestQueue`."""
        del self._waiting[request]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)


class PriorityQueue:
    """Smallest priority first, first come first served among equals."""

    def __init__(self) -> None:
        # Sorted; no two requests arrive at the same place, so requests themselves are never compared.
        self._waiting: list[tuple[int, int, Request]] = []

    def push(self, request: Request) -> None:
        """See `RequestQueue`."""
        insort(self._waiting, (request.priority, request.arrival, request))

    def restore(self, request: Request) -> None:
        """See `RequestQueue`."""
        self.push(request)

    def peek(self) -> Request | None:
        """See `RequestQueue`."""
        return self._waiting[0][2] if self._waiting else None

    def remove(self, request: Request) -> None:
        """See `RequestQueue`."""
        del self._waiting[bisect_left(self._waiting, (request.priority, request.arrival, request))]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._waiting)
