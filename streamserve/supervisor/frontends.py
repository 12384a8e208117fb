"""The frontends of a server, each in its place: one that dies while the server serves is followed by another.

    serving ──ends──► vacant ──the engine knows, the delay is over──► starting ──ready──► serving
                        │                                                └─ends, not ready in time──► vacant
                        └─too often──► ChildFailed

The streams of the dead one are lost; nothing else is (see `SharedState.hand_over`).
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass

from streamserve.config import SupervisorConfig
from streamserve.ipc.layout import RingCorrupted
from streamserve.supervisor.children import Child, ChildFailed
from streamserve.supervisor.launcher import Launcher
from streamserve.supervisor.restarts import Restarts
from streamserve.supervisor.segments import SharedState
from streamserve.supervisor.watch import Watch

logger = logging.getLogger(__name__)

# How often the engine is told again as long as the ring to it is full.
RETRY_S = 0.05


@dataclass(slots=True)
class _Place:
    """One of the frontends, whichever process it is.

    Attributes:
        child: the process; None between two of them.
        started_s: when it started.
        due_s: when the next one may start; when one that is not ready is killed.
        is_handed_over: whether the engine knows that the last one is gone.
        restarts: how often there was another.
    """

    child: Child | None
    name: str
    started_s: float
    restarts: Restarts
    due_s: float = math.inf
    is_handed_over: bool = True

    def next_s(self, now_s: float) -> float:
        """When something is to be done about it."""
        return self.due_s if self.is_handed_over else now_s + RETRY_S


class Frontends:
    """Starts them, and starts them again.

    Args:
        config: how often, and how long a start may take.
        launcher: starts the processes.
        shared: where the channels are.
        watch: what the supervisor waits with.
        clock: monotonic seconds.
        epoch: of the engine that there is, or of the next.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        launcher: Launcher,
        shared: SharedState,
        watch: Watch,
        clock: Callable[[], float],
        *,
        epoch: Callable[[], int],
    ) -> None:
        self._max_restarts = config.max_frontend_restarts
        self._startup_timeout_s = config.startup_timeout
        self._launcher = launcher
        self._shared = shared
        self._watch = watch
        self._clock = clock
        self._epoch = epoch
        self._places: list[_Place] = []

    @property
    def children(self) -> list[Child]:
        """The processes that there are."""
        return [place.child for place in self._places if place.child is not None]

    def start(self) -> None:
        """Starts all of them.

        Raises:
            OSError: a process could not be started.
        """
        for index in range(len(self._shared.channels)):
            child = self._launch(index)
            restarts = Restarts(self._max_restarts, "--max-frontend-restarts")
            self._places.append(_Place(child, child.name, self._clock(), restarts))

    def bury(self, child: Child) -> None:
        """Takes note that `child` has ended while the server serves, and that its place is to be filled.

        Raises:
            ChildFailed: it has happened too often.
        """
        place = next(place for place in self._places if place.child is child)
        place.child = None
        place.is_handed_over = False
        if child.is_ready:
            place.restarts.forgive(self._clock() - place.started_s)
        self._vacate(place, child.epitaph())

    def tend(self) -> float | None:
        """Does what is due. Seconds until there is more to do; None: nothing before something happens.

        Raises:
            ChildFailed: a place cannot be filled.
        """
        for index, place in enumerate(self._places):
            if place.child is None:
                self._fill(index, place)
            elif place.child.is_ready:
                place.due_s = math.inf
            elif self._clock() >= place.due_s:
                logger.error("the %s was not ready in %g s", place.name, self._startup_timeout_s)
                place.due_s = math.inf
                place.child.send(signal.SIGKILL)
        now = self._clock()
        next_s = min((place.next_s(now) for place in self._places), default=math.inf)
        return None if next_s == math.inf else max(0.0, next_s - now)

    def _launch(self, index: int) -> Child:
        child = self._launcher.frontend(index, self._epoch())
        self._watch.add(child)
        return child

    def _vacate(self, place: _Place, how: str) -> None:
        delay_s = place.restarts.next_delay_s(place.name, how)
        place.due_s = self._clock() + delay_s
        logger.error("the %s %s; its streams are lost, another starts in %g s", place.name, how, delay_s)

    def _fill(self, index: int, place: _Place) -> None:
        """Starts the next process of a vacant place if it is time."""
        if not place.is_handed_over:
            place.is_handed_over = self._hand_over(index, place)
        if not place.is_handed_over or self._clock() < place.due_s:
            return
        try:
            place.child = self._launch(index)
        except OSError as error:
            self._vacate(place, f"could not be started: {error}")
        else:
            place.started_s = self._clock()
            place.due_s = place.started_s + self._startup_timeout_s

    def _hand_over(self, index: int, place: _Place) -> bool:
        try:
            return self._shared.hand_over(index, self._epoch())
        except RingCorrupted as error:
            raise ChildFailed(f"the {place.name} left its channel damaged: {error}") from error
