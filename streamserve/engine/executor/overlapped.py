"""One worker in the engine's own process whose device works on its own: steps are launched and read later."""

from __future__ import annotations

from streamserve.engine.executor.base import PendingStep
from streamserve.engine.executor.inline import InlineExecutor
from streamserve.engine.step import StepDiff


class OverlappedExecutor(InlineExecutor):
    """Launches a step while the one before still runs on the device, then reads the latter's tokens.

    A GPU needs no thread for that, since being asked for a step takes the host a fraction of what it takes
    the device. Everything happens in the engine's thread, in one order, and nobody contends for the
    interpreter. While the engine waits for a result, the device has the next step already.
    """

    depth = 2

    def submit(self, diff: StepDiff) -> PendingStep:
        """Has the device run the step behind the others."""
        return self._worker.launch(diff)
