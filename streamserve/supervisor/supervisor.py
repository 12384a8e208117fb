"""PROCESS 0: starts the children, watches them, and ends with none of them left.

    STARTING ──all ready──► SERVING ──SIGTERM, SIGINT──► draining ──frontends gone──► engine stopped, exit 0
        │                      │ │
        │                      │ └─a frontend ends──► another is started; too often──► all stopped, exit 1
        └─a child fails─┐      └─the engine ends──► another is started, which goes on with all requests;
                        │                           too often──► the frontends tell all clients, exit 1
                        └► all stopped, exit 1 (2: as configured it cannot run)

The first child brings the model and ends. The others start when the model is there, or when it is clear that
it takes a while, and then wait for it.

A second signal kills whatever is left at once. While it serves, the supervisor sleeps in one `select`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from streamserve.bootstrap import STOP_ORDER, ResolvedModel
from streamserve.config import SupervisorConfig
from streamserve.ipc.board import EngineState
from streamserve.supervisor.children import Child, ChildFailed
from streamserve.supervisor.engine import Engine
from streamserve.supervisor.frontends import Frontends
from streamserve.supervisor.launcher import Launcher
from streamserve.supervisor.reports import Failed, Progress, ProgressLog, Ready, Report
from streamserve.supervisor.segments import SharedState
from streamserve.supervisor.watch import Event, Exited, Reported, Signalled, Watch

logger = logging.getLogger(__name__)

# What a child may take to end after the order to stop, or after reporting that it failed; then it is killed.
STOP_GRACE_S = 5.0
# What a frontend may take on top of the drain timeout to end what did not finish and close its connections.
DRAIN_MARGIN_S = 10.0
# What the model may take to be found before the others start. If it is on the disk, they would only slow that
# down; if it is not to be had, they would start in vain.
HEAD_START_S = 1.0
# The exit code, of a child as of the server, that means: not as configured.
CONFIG_EXIT_CODE = 2


class StopRequested(Exception):
    """SIGTERM or SIGINT came while starting or serving."""


class ForcedStop(Exception):
    """A signal came while stopping."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


class Supervisor:
    """Runs one server from start to end.

    Args:
        config: limits.
        launcher: starts the children.
        shared: where the engine's state is published.
        watch: what the supervisor waits with.
        stop_listening: closes this process's copy of the TCP socket.
        announce: tells the operator that the server is ready, and the name of its model.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        config: SupervisorConfig,
        launcher: Launcher,
        shared: SharedState,
        watch: Watch,
        stop_listening: Callable[[], None],
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._shared = shared
        self._watch = watch
        self._stop_listening = stop_listening
        self._announce = announce
        self._clock = clock
        self._progress = ProgressLog(logger.info)
        self._preparation: Child | None = None
        self._model: ResolvedModel | None = None
        self._engine = Engine(config, launcher, shared, watch, clock)
        self._frontends = Frontends(config, launcher, shared, watch, clock, epoch=lambda: self._engine.epoch)
        self._is_serving = False
        self._has_lost_streams = False
        self._undelivered: deque[Event] = deque()

    def run(self) -> int:
        """Starts, serves and stops; returns the exit code of the server, with no child left."""
        try:
            return self._run()
        except ForcedStop as stop:
            logger.warning("stopped at once by a second signal")
            return 128 + stop.number
        finally:
            self._kill(self._children())

    def _run(self) -> int:
        try:
            self._start()
            self._serve()
        except StopRequested:
            return self._drain()
        except ChildFailed as failure:
            return self._fail(failure)

    def _start(self) -> None:
        self._engine.publish(EngineState.STARTING)
        try:
            self._prepare()
            self._launch()
        except OSError as error:
            raise ChildFailed(f"a child process could not be started: {error}") from error
        # A download takes as long as it takes.
        while self._model is None:
            for event in self._events(None):
                self._handle(event)
        deadline = self._clock() + self._config.startup_timeout
        while waiting := [
            child for child in self._children() if not child.is_ready or child is self._preparation
        ]:
            if self._clock() >= deadline:
                raise ChildFailed(self._timed_out(waiting[0]))
            for event in self._events(deadline - self._clock()):
                self._handle(event)
        self._is_serving = True
        self._announce(self._model.name)

    def _prepare(self) -> None:
        preparation = self._preparation = self._launcher.model()
        self._watch.add(preparation)
        deadline = self._clock() + HEAD_START_S
        while self._model is None and self._progress.latest(preparation.name) is None:
            if self._clock() >= deadline:
                return
            for event in self._events(deadline - self._clock()):
                self._handle(event)

    def _launch(self) -> None:
        # Side by side: a frontend answers /live long before the weights are read.
        self._engine.start()
        self._frontends.start()

    def _serve(self) -> NoReturn:
        while True:
            due_s = (self._engine.tend(), self._frontends.tend())
            for event in self._events(min((each for each in due_s if each is not None), default=None)):
                self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case Signalled():
                raise StopRequested
            case Reported(child, report):
                self._hear(child, report)
            case Exited(child) if child is self._preparation and self._model is not None:
                self._preparation = None
            case Exited(child) if not self._is_serving:
                raise ChildFailed(f"the {child.name} {child.epitaph()} while starting")
            case Exited(child) if child is self._engine.child:
                self._engine.bury()
            case Exited(child):
                self._frontends.bury(child)

    def _hear(self, child: Child, report: Report) -> None:
        match report:
            case Progress(what, fraction):
                self._progress.report(child.name, what, fraction)
                if child in (self._preparation, self._engine.child):
                    self._shared.report_progress(what, fraction)
            case Ready(facts) if child is self._preparation:
                child.is_ready = True
                self._model = ResolvedModel.from_dict(facts)
                self._shared.publish_model(self._model)
            case Ready(facts):
                child.is_ready = True
                details = ", ".join(f"{name} {value}" for name, value in facts.items())
                logger.info("%s: ready%s", child.name, f" ({details})" if details else "")
                if child is self._engine.child:
                    self._engine.serve()
            case Failed(message) if self._is_serving and child.is_ready:
                logger.error("the %s says why it ends: %s", child.name, message)
            case Failed(message) if self._is_serving:
                logger.error("the %s cannot start: %s", child.name, message)
            case Failed(message) if child is self._preparation:
                raise ChildFailed(message, reported_by=child)
            case Failed(message):
                raise ChildFailed(f"the {child.name} cannot start: {message}", reported_by=child)

    def _timed_out(self, child: Child) -> str:
        latest = self._progress.latest(child.name)
        doing = f"; it was at: {latest}" if latest else ""
        return (
            f"--startup-timeout: the {child.name} was not ready in {self._config.startup_timeout:g} s{doing}"
        )

    def _drain(self) -> int:
        """Lets open streams finish, then stops the engine that feeds them; one that dies is started again."""
        if not self._is_serving:
            logger.info("stopping before the server was ready")
            self._terminate(self._children())
            return 0
        logger.info("stopping: open streams may take %g s to finish", self._config.drain_timeout)
        self._engine.drain()
        # While any copy of the socket is open the kernel goes on accepting connections, for nobody.
        self._stop_listening()
        frontends = self._frontends.children
        for frontend in frontends:
            frontend.send(STOP_ORDER)
        in_time = self._await_end(frontends, self._config.drain_timeout + DRAIN_MARGIN_S, needs_engine=True)
        for child in frontends:
            # One that was only starting had no streams, and did not know the order yet.
            if child.returncode and child.is_ready:
                self._mourn(f"the {child.name} {child.epitaph()}")
        if not in_time:
            logger.warning("a frontend did not finish in time and is killed")
            self._kill(frontends)
        self._terminate(self._children())
        return 1 if self._has_lost_streams else 0

    def _mourn(self, what: str) -> None:
        self._has_lost_streams = True
        _complain(f"{what} while streams were finishing")

    def _fail(self, failure: ChildFailed) -> int:
        """Says why, lets the frontends say so to their clients, and stops everything."""
        _complain(str(failure))
        self._engine.publish(EngineState.DEAD)
        if self._is_serving and self._engine.child is None:
            self._await_end(self._frontends.children, self._config.engine_failure_grace)
        if failure.reported_by is not None:
            self._await_end([failure.reported_by], STOP_GRACE_S)
        self._terminate(self._children())
        reporter = failure.reported_by
        return CONFIG_EXIT_CODE if reporter and reporter.returncode == CONFIG_EXIT_CODE else 1

    def _terminate(self, children: Sequence[Child]) -> None:
        for child in children:
            child.send(STOP_ORDER)
        if not self._await_end(children, STOP_GRACE_S):
            self._kill(children)

    def _kill(self, children: Sequence[Child]) -> None:
        for child in children:
            child.send(signal.SIGKILL)
        if not self._await_end(children, STOP_GRACE_S, is_final=True):
            logger.error("a process does not die; it hangs in the kernel")

    def _await_end(
        self,
        children: Sequence[Child],
        timeout_s: float,
        *,
        is_final: bool = False,
        needs_engine: bool = False,
    ) -> bool:
        """Waits until all `children` have ended; False when they took too long.

        Args:
            children: which.
            timeout_s: how long they may take.
            is_final: signals are ignored.
            needs_engine: they need it to end, so one that dies is started again.

        Raises:
            ForcedStop: a signal came, and the wait is not the final one.
        """
        deadline = self._clock() + timeout_s
        while any(child.returncode is None for child in children):
            if self._clock() >= deadline:
                return False
            due_s = self._tend_engine() if needs_engine else None
            left_s = deadline - self._clock()
            for event in self._events(left_s if due_s is None else min(due_s, left_s)):
                match event:
                    case Signalled(number) if not is_final:
                        raise ForcedStop(number)
                    case Reported(child, report) if needs_engine and child is self._engine.child:
                        self._hear(child, report)
                    case Exited(child) if child is self._engine.child:
                        self._lose_engine(is_needed=needs_engine)
        return True

    def _tend_engine(self) -> float | None:
        try:
            return self._engine.tend()
        except ChildFailed as failure:
            self._give_engine_up(failure)
            return None

    def _lose_engine(self, *, is_needed: bool) -> None:
        if not is_needed:
            self._engine.publish(EngineState.DEAD)
            return
        try:
            self._engine.bury()
        except ChildFailed as failure:
            self._give_engine_up(failure)

    def _give_engine_up(self, failure: ChildFailed) -> None:
        """The streams that are left end with an error."""
        self._mourn(str(failure))
        self._engine.publish(EngineState.DEAD)

    def _events(self, timeout_s: float | None) -> Iterator[Event]:
        """What happens next; events that an exception kept from being handled come first."""
        if not self._undelivered:
            self._undelivered.extend(self._watch.wait(timeout_s))
        while self._undelivered:
            yield self._undelivered.popleft()

    def _children(self) -> list[Child]:
        others = [child for child in (self._preparation, self._engine.child) if child is not None]
        return others + self._frontends.children


def _complain(message: str) -> None:
    """The one line that says what went wrong."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"streamserve: error: {message}\n")
        sys.stderr.flush()
