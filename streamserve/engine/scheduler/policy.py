"""In which order waiting requests get their turn: one small class for each `--scheduling-policy`.

A policy orders admission, and no more: a request that runs is not stopped for one that comes later, however
important that is. When memory runs short, the latest request gives way; under `priority`, the latest of those
with the largest number. Under the other policies nobody gets anything by a priority that clients choose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import chain

import numpy as np

from streamserve.engine.scheduler.states import Request
from streamserve.engine.scheduler.table import RequestTable

# What a token counts under fair scheduling, as in the paper: decoding a token takes a step, prefill does not.
PROMPT_TOKEN_WEIGHT, OUTPUT_TOKEN_WEIGHT = 1, 2


class RequestQueue(ABC):
    """The waiting requests. None of them is overtaken by one behind it: only the first is ever admitted.

    A policy that goes by what was served hears of it by `update`, `seated` and `left`.

    Attributes:
        heeds_priority: whether requests have a priority at all.
    """

    heeds_priority: bool = False

    @abstractmethod
    def push(self, request: Request) -> None:
        """A new request waits. What an engine before this one ran has had its turn, and comes first."""

    @abstractmethod
    def restore(self, request: Request) -> None:
        """A preempted request waits; it goes before all that have not run yet (and are no more important)."""

    @abstractmethod
    def peek(self) -> Request | None:
        """The request whose turn is next; None when nothing waits."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """`request`, wherever it stands, waits no more (admitted, aborted or expired)."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    def update(self) -> None:  # noqa: B027
        """A round of `peek` follows: takes in how far the running requests are."""

    def seated(self, request: Request, num_tokens: int) -> None:  # noqa: B027
        """`request` has got a slot, with `num_tokens` to compute; 0 if it had one before."""

    def left(self, slot: int) -> None:  # noqa: B027
        """The request in `slot` is about to give it up."""


class FcfsQueue(RequestQueue):
    """First come, first served. Every operation is O(1)."""

    def __init__(self) -> None:
        # Those that have run before, and those that have not.
        self._returned: OrderedDict[Request, None] = OrderedDict()
        self._waiting: OrderedDict[Request, None] = OrderedDict()

    def push(self, request: Request) -> None:
        """See `RequestQueue`."""
        (self._returned if request.has_run else self._waiting)[request] = None

    def restore(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._returned[request] = None
        self._returned.move_to_end(request, last=False)

    def peek(self) -> Request | None:
        """See `RequestQueue`."""
        return next(iter(self), None)

    def remove(self, request: Request) -> None:
        """See `RequestQueue`."""
        del (self._returned if request in self._returned else self._waiting)[request]

    def __contains__(self, request: Request) -> bool:
        return request in self._returned or request in self._waiting

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returned, self._waiting)


class PriorityQueue(RequestQueue):
    """Smallest priority first, first come first served among equals.

    A flood of important requests keeps the others waiting for as long as it lasts.
    """

    heeds_priority = True

    def __init__(self) -> None:
        # Sorted; no two requests arrive at the same place, so requests themselves are never compared.
        self._waiting: list[tuple[int, bool, int, Request]] = []

    def push(self, request: Request) -> None:
        """See `RequestQueue`."""
        insort(self._waiting, _rank(request))

    def restore(self, request: Request) -> None:
        """See `RequestQueue`."""
        self.push(request)

    def peek(self) -> Request | None:
        """See `RequestQueue`."""
        return self._waiting[0][-1] if self._waiting else None

    def remove(self, request: Request) -> None:
        """See `RequestQueue`."""
        del self._waiting[bisect_left(self._waiting, _rank(request))]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in self._waiting)


def _rank(request: Request) -> tuple[int, bool, int, Request]:
    return request.priority, not request.has_run, request.arrival, request


class _Tenant:
    """Whoever shares an account: its waiting requests, and the row of the account."""

    __slots__ = ("index", "is_ranked", "waiting")

    def __init__(self, index: int) -> None:
        self.index = index
        self.waiting = FcfsQueue()
        self.is_ranked = False


class FairQueue(RequestQueue):
    """The tenant that has been served least goes first; within a tenant, first come first served.

    These are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (2023).
    Each tenant has a counter of the weighted tokens that it was served: those of a prompt that the cache did
    not have when its request gets a slot, and each output token. The waiting request of the smallest counter
    is next. A tenant that had nothing waiting is lifted to the smallest counter of those that have, so that
    nobody saves up a claim by staying away. While two tenants both keep requests waiting, what they are
    served differs by at most twice the weight of the longest prompt, or of the output that fits into the KV
    cache if that is more, however many requests either of them sends.

    Output is charged only when it matters: `update` takes in all running requests as vectors, and only
    before somebody is to be admitted; a step in which nobody can be costs nothing. Counters never go down,
    so the heap may hold old ones: an entry that comes up too early is put back where it belongs.

    A preempted request has had its turn and been charged for it: it goes before all others. So does one that
    an engine before this one ran; to compute its tokens once more is what its tenant is charged with here.
    Tenants are never forgotten; there are as many as the operator has named API keys.

    Args:
        table: the running requests.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._tenants: dict[str, _Tenant] = {}
        self._by_index: list[_Tenant] = []
        self._counters = np.zeros(8, dtype=np.int64)
        # For each slot: whose account its tokens go to, and how many of its tokens have been dealt with.
        self._payer = np.zeros(len(table.requests), dtype=np.intp)
        self._charged = np.zeros(len(table.requests), dtype=np.int64)
        self._preempted = FcfsQueue()
        # (counter, arrival of the first that waits, tenant), one entry a tenant, maybe an old one.
        self._ranking: list[tuple[int, int, int]] = []
        self._num_waiting = 0
        self._last: _Tenant | None = None

    def push(self, request: Request) -> None:
        """See `RequestQueue`."""
        if request.has_run:
            self._preempted.push(request)
            return
        tenant = self._tenant(request.tenant)
        if not tenant.waiting:
            self._lift(tenant)
        tenant.waiting.push(request)
        self._num_waiting += 1
        if not tenant.is_ranked:
            tenant.is_ranked = True
            heappush(self._ranking, self._rank(tenant))

    def restore(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._preempted.restore(request)

    def peek(self) -> Request | None:
        """See `RequestQueue`."""
        if self._preempted:
            return self._preempted.peek()
        first = self._first()
        return None if first is None else first.waiting.peek()

    def remove(self, request: Request) -> None:
        """See `RequestQueue`."""
        if request in self._preempted:
            self._preempted.remove(request)
            return
        tenant = self._tenants[request.tenant]
        tenant.waiting.remove(request)
        self._num_waiting -= 1
        if not tenant.waiting:
            self._last = tenant

    def update(self) -> None:
        """See `RequestQueue`. A few vector operations."""
        slots = self._table.order
        known = self._table.num_tokens[slots]
        new = known - self._charged[slots]
        np.add.at(self._counters, self._payer[slots], OUTPUT_TOKEN_WEIGHT * new)
        self._charged[slots] = known

    def seated(self, request: Request, num_tokens: int) -> None:
        """See `RequestQueue`."""
        slot, tenant = request.slot, self._tenant(request.tenant)
        self._counters[tenant.index] += PROMPT_TOKEN_WEIGHT * num_tokens
        self._payer[slot] = tenant.index
        self._charged[slot] = self._table.num_tokens[slot]

    def left(self, slot: int) -> None:
        """See `RequestQueue`."""
        new = self._table.num_tokens[slot] - self._charged[slot]
        self._counters[self._payer[slot]] += OUTPUT_TOKEN_WEIGHT * new

    def __len__(self) -> int:
        return self._num_waiting + len(self._preempted)

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        for tenant in self._by_index:
            yield from tenant.waiting

    def counter(self, tenant: str) -> int:
        """What `tenant` was served or lifted to, in weighted tokens, as of the last `update`."""
        known = self._tenants.get(tenant)
        return 0 if known is None else int(self._counters[known.index])

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(len(self._by_index))
            self._by_index.append(tenant)
            if len(self._by_index) > len(self._counters):
                self._counters = np.concatenate([self._counters, np.zeros_like(self._counters)])
        return tenant

    def _lift(self, tenant: _Tenant) -> None:
        """`tenant` begins to wait: it claims no more than those that wait already, or did so last."""
        self.update()
        least = self._first() or self._last
        if least is not None:
            counters = self._counters
            counters[tenant.index] = max(counters[tenant.index], counters[least.index])

    def _first(self) -> _Tenant | None:
        """The tenant whose turn is next, of those with requests that have not run yet."""
        ranking = self._ranking
        while ranking:
            tenant = self._by_index[ranking[0][2]]
            if not tenant.waiting:
                heappop(ranking)
                tenant.is_ranked = False
            elif (rank := self._rank(tenant)) != ranking[0]:
                heapreplace(ranking, rank)
            else:
                return tenant
        return None

    def _rank(self, tenant: _Tenant) -> tuple[int, int, int]:
        first = tenant.waiting.peek()
        assert first is not None, f"tenant {tenant.index} has nothing waiting"
        return int(self._counters[tenant.index]), first.arrival, tenant.index


def make_queue(policy: str, table: RequestTable) -> RequestQueue:
    """The empty queue of a policy: `fcfs`, `priority` or `fair`."""
    match policy:
        case "fcfs":
            return FcfsQueue()
        case "priority":
            return PriorityQueue()
        case "fair":
            return FairQueue(table)
    raise AssertionError(f"no scheduling policy {policy!r}")
