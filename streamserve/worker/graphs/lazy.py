"""Captures graphs while the server already serves: a few between steps, the others while nobody waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from streamserve.worker.graphs.runner import GraphRunner

logger = logging.getLogger(__name__)

# Of the time between two captures and the latter: what streams notice least while it lasts minutes, not
# hours.
_SHARE = 0.2


class LazyCapture:
    """Takes a fixed share of the time, between steps, until all graphs are there.

    Args:
        graphs: whose they are.
        clock: seconds.
    """

    def __init__(self, graphs: GraphRunner, clock: Callable[[], float] = time.perf_counter) -> None:
        self._graphs = graphs
        self._clock = clock
        self._not_before = 0.0

    def advance(self) -> None:
        """Captures a graph if there is one left and it is time. Hot: once a step."""
        if self._graphs.num_waiting == 0:
            return
        begin = self._clock()
        if begin < self._not_before:
            return
        self._capture()
        end = self._clock()
        self._not_before = end + (end - begin) * (1 / _SHARE - 1)

    def advance_idle(self) -> bool:
        """Captures a graph if there is one left; between two calls, whoever came meanwhile can be served.

        Returns:
            False if there was none.
        """
        if self._graphs.num_waiting == 0:
            return False
        self._capture()
        return True

    def _capture(self) -> None:
        """One that fails is no reason to drop streams: the server goes on with the graphs that it has."""
        try:
            self._graphs.capture_next()
        except RuntimeError:
            logger.exception("capturing a graph failed; %d are left out", self._graphs.num_waiting + 1)
            self._graphs.give_up()
        if self._graphs.num_waiting == 0:
            logger.info("all graphs are captured")
