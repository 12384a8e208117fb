"""The engine of a server: one that dies while the server serves is followed by another, of the next epoch.

    serving ──ends──► gone ──the delay is over──► starting ──ready──► serving
                       │                             └─ends, not ready in time──► gone
                       └─too often──► ChildFailed

Its requests live on in the frontends, which give them to the next one (streamserve.frontend.readmission).
What it left in the rings is told apart by the epoch that every frame carries.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable

from streamserve.config import SupervisorConfig
from streamserve.ipc.board import FIRST_EPOCH, EngineState
from streamserve.supervisor.children import Child
from streamserve.supervisor.launcher import Launcher
from streamserve.supervisor.restarts import Restarts
from streamserve.supervisor.segments import SharedState
from streamserve.supervisor.watch import Watch

logger = logging.getLogger(__name__)


class Engine:
    """Starts it, starts it again, and says on the status board how it is.

    Args:
        config: how often, and how long a start may take.
        launcher: starts the processes.
        shared: where the status board is.
        watch: what the supervisor waits with.
        clock: monotonic seconds.

    Attributes:
        child: the process; None between two of them.
        epoch: of the one that there is, or else of the next.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        launcher: Launcher,
        shared: SharedState,
        watch: Watch,
        clock: Callable[[], float],
    ) -> None:
        self.child: Child | None = None
        self.epoch = FIRST_EPOCH
        self._startup_timeout_s = config.startup_timeout
        self._restarts = Restarts(config.max_engine_restarts, "--max-engine-restarts")
        self._launcher = launcher
        self._shared = shared
        self._watch = watch
        self._clock = clock
        self._is_draining = False
        self._ready_s = math.inf
        # When the next one starts; when one that is not ready is killed.
        self._due_s = math.inf

    def publish(self, state: EngineState) -> None:
        """Puts `state` on the board."""
        self._shared.publish(self.epoch, state)

    def start(self) -> None:
        """Starts a process.

        Raises:
            OSError: it could not be started.
        """
        self.child = self._launcher.engine(self.epoch)
        self._watch.add(self.child)
        self._ready_s = math.inf
        self._due_s = self._clock() + self._startup_timeout_s

    def serve(self) -> None:
        """Takes note that it is ready."""
        self._ready_s = self._clock()
        self._due_s = math.inf
        self.publish(EngineState.DRAINING if self._is_draining else EngineState.READY)

    def drain(self) -> None:
        """It is needed for the streams that there are, and for no others."""
        self._is_draining = True
        self.publish(EngineState.DRAINING)

    def bury(self) -> None:
        """Takes note that it has ended while the server needs it, and that another is to follow.

        Raises:
            ChildFailed: it has happened too often.
        """
        assert self.child is not None, "there is no engine to bury"
        how, self.child = self.child.epitaph(), None
        self._restarts.forgive(self._clock() - self._ready_s)
        self._await_next(how)

    def tend(self) -> float | None:
        """Does what is due. Seconds until there is more to do; None: nothing before something happens.

        Raises:
            ChildFailed: no process can be started.
        """
        if self._clock() >= self._due_s:
            if self.child is None:
                self._start_again()
            else:
                logger.error("the %s was not ready in %g s", self.child.name, self._startup_timeout_s)
                self._due_s = math.inf
                self.child.send(signal.SIGKILL)
        return None if self._due_s == math.inf else max(0.0, self._due_s - self._clock())

    def _start_again(self) -> None:
        try:
            self.start()
        except OSError as error:
            self._await_next(f"could not be started: {error}")

    def _await_next(self, how: str) -> None:
        self._due_s = math.inf
        delay_s = self._restarts.next_delay_s("engine", how)
        self._due_s = self._clock() + delay_s
        self.epoch += 1
        self._shared.report_progress("starting the engine again", 0.0)
        self.publish(EngineState.DRAINING if self._is_draining else EngineState.STARTING)
        logger.error("the engine %s; its requests wait for another, which starts in %g s", how, delay_s)
