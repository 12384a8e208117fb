"""All collaborators of a supervisor, played by a script."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from streamserve.bootstrap import ResolvedModel
from streamserve.config import SupervisorConfig
from streamserve.ipc.board import EngineState
from streamserve.ipc.layout import RingCorrupted
from streamserve.supervisor.reports import Ready, Report
from streamserve.supervisor.supervisor import Supervisor
from streamserve.supervisor.watch import Event, Exited, Reported, Signalled

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
MODEL = {"path": "/models/tiny", "name": "tiny", "dtype": "float32", "load_format": "dummy"}
ANNOUNCED = "announce tiny"

Happening = Callable[[], Event]


class FakeChild:
    """A child that dies of SIGKILL alone; all else is in the script."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.is_ready = False
        self.returncode: int | None = None
        self.is_killed = False
        self._log = log

    def send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            self.is_killed |= number == KILL
            self._log.append(f"{number.name} to {self.name}")

    def epitaph(self) -> str:
        return f"ended with {self.returncode}"


def reports(child: FakeChild, report: Report) -> Happening:
    return lambda: Reported(child, report)  # type: ignore[arg-type]


def ends(child: FakeChild, code: int = 0) -> Happening:
    def happen() -> Event:
        child.returncode = code
        return Exited(child)  # type: ignore[arg-type]

    return happen


def signals(number: signal.Signals) -> Happening:
    return lambda: Signalled(number)


class World:
    """Plays all collaborators of a `Supervisor`, writes down what it does to them, and is its clock.

    Attributes:
        engine_child, frontends: the processes there are now; a successor takes the place of the one before.
        handovers: what comes of the next attempts to hand a channel over; then all succeed.
        refuses_to_start: processes cannot be started.
    """

    def __init__(self, **limits: Any) -> None:
        self.log: list[str] = []
        self.model_child = FakeChild("model process", self.log)
        self.engine_child = FakeChild("engine", self.log)
        self.frontends = [FakeChild("frontend 0", self.log), FakeChild("frontend 1", self.log)]
        self.dead: list[FakeChild] = []
        self.channels = self.frontends
        self.handovers: list[bool | RingCorrupted] = []
        self.refuses_to_start = False
        self.now_s = 0.0
        self._script: list[tuple[Happening, ...]] = []
        self._supervisor = Supervisor(
            config=SupervisorConfig(**limits),
            launcher=self,  # type: ignore[arg-type]
            shared=self,  # type: ignore[arg-type]
            watch=self,  # type: ignore[arg-type]
            stop_listening=lambda: self.log.append("stop listening"),
            announce=lambda name: self.log.append(f"announce {name}"),
            clock=lambda: self.now_s,
        )

    def model(self) -> FakeChild:
        self.log.append("start model process")
        return self.model_child

    def engine(self, epoch: int) -> FakeChild:
        if self.refuses_to_start:
            raise OSError("out of processes")
        self.log.append(f"start engine, epoch {epoch}")
        if self.engine_child.returncode is not None:
            self.dead.append(self.engine_child)
            self.engine_child = FakeChild("engine", self.log)
        return self.engine_child

    def frontend(self, index: int, _epoch: int) -> FakeChild:
        if self.refuses_to_start:
            raise OSError("out of processes")
        self.log.append(f"start frontend {index}")
        if self.frontends[index].returncode is not None:
            self.dead.append(self.frontends[index])
            self.frontends[index] = FakeChild(f"frontend {index}", self.log)
        return self.frontends[index]

    def hand_over(self, index: int, epoch: int) -> bool:
        outcome = self.handovers.pop(0) if self.handovers else True
        if isinstance(outcome, RingCorrupted):
            raise outcome
        self.log.append(f"hand over {index}, epoch {epoch}" if outcome else f"no room in ring {index}")
        return outcome

    def publish(self, _epoch: int, state: EngineState) -> None:
        self.log.append(state.name)

    def publish_model(self, model: ResolvedModel) -> None:
        self.log.append(f"model {model.name} at {model.path}")

    def report_progress(self, what: str, fraction: float) -> None:
        self.log.append(f"{what} {fraction:.0%}")

    def add(self, child: FakeChild) -> None:
        pass

    def wait(self, timeout_s: float | None) -> list[Event]:
        if self._script and (happenings := self._script.pop(0)):
            return [happen() for happen in happenings]
        for child in (self.model_child, self.engine_child, *self.frontends):
            if child.is_killed and child.returncode is None:
                return [ends(child, -KILL)()]
        assert timeout_s is not None, "it waits for ever, as an idle server does"
        self.now_s += timeout_s
        self.log.append(f"{timeout_s:g} s later")
        return []

    def then(self, *happenings: Happening) -> World:
        """What the next wait brings; without anything, its time passes."""
        self._script.append(happenings)
        return self

    def with_model(self) -> World:
        """The model is found."""
        return self.then(reports(self.model_child, Ready(MODEL))).then(ends(self.model_child))

    def serving(self) -> World:
        """All become ready."""
        self.with_model()
        for child in (*self.frontends, self.engine_child):
            self.then(reports(child, Ready({})))
        return self

    def run(self) -> int:
        code = self._supervisor.run()
        assert not self._script
        assert all(child.returncode is not None for child in self.dead)
        children = (self.model_child, self.engine_child, *self.frontends)
        started = [child for child in children if any(f"start {child.name}" in entry for entry in self.log)]
        assert all(child.returncode is not None for child in started)
        return code

    def after(self, mark: str) -> list[str]:
        return self.log[self.log.index(mark) + 1 :]


def dies(world: World, index: int = 0, code: int = -KILL) -> Happening:
    """Whoever is frontend `index` then."""

    def happen() -> Event:
        return ends(world.frontends[index], code)()

    return happen


def engine_dies(world: World, code: int = -KILL) -> Happening:
    """Whoever is the engine then."""

    def happen() -> Event:
        return ends(world.engine_child, code)()

    return happen


def engine_says(world: World, report: Report) -> Happening:
    """Whoever is the engine then."""

    def happen() -> Event:
        return reports(world.engine_child, report)()

    return happen


def says(world: World, index: int, report: Report) -> Happening:
    """Whoever is frontend `index` then."""

    def happen() -> Event:
        return reports(world.frontends[index], report)()

    return happen


def is_ready(world: World, index: int = 0) -> Happening:
    return says(world, index, Ready({}))


def stopped(world: World) -> World:
    """SIGTERM, and all end in good order."""
    world.then(signals(TERM)).then(dies(world, 0, 0), dies(world, 1, 0))
    return world.then(engine_dies(world, 0))
