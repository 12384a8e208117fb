"""What the supervisor decides, against fake children; test_processes.py has real ones."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from streamserve.config import SupervisorConfig
from streamserve.ipc.board import EngineState
from streamserve.supervisor.reports import Failed, Progress, Ready, Report
from streamserve.supervisor.supervisor import DRAIN_MARGIN_S, STOP_GRACE_S, Supervisor
from streamserve.supervisor.watch import Event, Exited, Reported, Signalled

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL

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
    """Plays all collaborators of a `Supervisor`, writes down what it does to them, and is its clock."""

    def __init__(self, **limits: float) -> None:
        self.log: list[str] = []
        self.engine_child = FakeChild("engine", self.log)
        self.frontends = [FakeChild("frontend 0", self.log), FakeChild("frontend 1", self.log)]
        self.channels = self.frontends
        self.now_s = 0.0
        self._script: list[tuple[Happening, ...]] = []
        self._supervisor = Supervisor(
            config=SupervisorConfig(**limits),
            launcher=self,  # type: ignore[arg-type]
            shared=self,  # type: ignore[arg-type]
            watch=self,  # type: ignore[arg-type]
            stop_listening=lambda: self.log.append("stop listening"),
            announce=lambda: self.log.append("announce"),
            clock=lambda: self.now_s,
        )

    def engine(self, epoch: int) -> FakeChild:
        self.log.append(f"start engine, epoch {epoch}")
        return self.engine_child

    def frontend(self, index: int, _epoch: int) -> FakeChild:
        self.log.append(f"start frontend {index}")
        return self.frontends[index]

    def publish(self, _epoch: int, state: EngineState) -> None:
        self.log.append(state.name)

    def report_progress(self, what: str, fraction: float) -> None:
        self.log.append(f"{what} {fraction:.0%}")

    def add(self, child: FakeChild) -> None:
        pass

    def wait(self, timeout_s: float | None) -> list[Event]:
        if self._script:
            return [happen() for happen in self._script.pop(0)]
        for child in (self.engine_child, *self.frontends):
            if child.is_killed and child.returncode is None:
                return [ends(child, -KILL)()]
        assert timeout_s is not None, "it waits for ever, as an idle server does"
        self.now_s += timeout_s
        self.log.append(f"{timeout_s:g} s later")
        return []

    def then(self, *happenings: Happening) -> World:
        """What the next wait brings."""
        self._script.append(happenings)
        return self

    def serving(self) -> World:
        """All become ready."""
        for child in (*self.frontends, self.engine_child):
            self.then(reports(child, Ready({})))
        return self

    def run(self) -> int:
        code = self._supervisor.run()
        assert not self._script
        assert all(child.returncode is not None for child in (self.engine_child, *self.frontends))
        return code

    def after(self, mark: str) -> list[str]:
        return self.log[self.log.index(mark) + 1 :]


@pytest.fixture
def world() -> World:
    return World(startup_timeout=60, drain_timeout=30, engine_failure_grace=7)


def test_ready_is_published_with_the_engine_and_announced_with_all(world: World) -> None:
    engine, (first, second) = world.engine_child, world.frontends
    world.then(reports(first, Ready({})), reports(engine, Progress("loading weights", 0.1)))
    world.then(reports(engine, Ready({"num_blocks": 7}))).then(reports(second, Ready({})))
    world.then(signals(TERM)).then(ends(first), ends(second)).then(ends(engine))
    assert world.run() == 0
    assert world.log == [
        "STARTING",
        "start engine, epoch 1",
        "start frontend 0",
        "start frontend 1",
        "loading weights 10%",
        "READY",
        "announce",
        "DRAINING",
        "stop listening",
        "SIGUSR1 to frontend 0",
        "SIGUSR1 to frontend 1",
        "SIGUSR1 to engine",
        "DEAD",
    ]


def test_an_idle_server_waits_without_a_timeout(world: World) -> None:
    with pytest.raises(AssertionError, match="for ever"):
        world.serving().run()


def test_a_child_that_cannot_start_is_heard_and_ends_by_itself(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, (first, second) = world.engine_child, world.frontends
    world.then(reports(engine, Failed("too little memory"))).then(ends(engine, 1)).then(
        ends(first), ends(second)
    )
    assert world.run() == 1
    assert world.after("start frontend 1") == [
        "DEAD",
        "DEAD",
        "SIGUSR1 to frontend 0",
        "SIGUSR1 to frontend 1",
    ]
    assert capsys.readouterr().err == "streamserve: error: the engine cannot start: too little memory\n"


def test_a_child_that_refuses_its_configuration_is_exit_code_2(world: World) -> None:
    engine = world.engine_child
    world.then(reports(engine, Failed("--dtype"))).then(ends(engine, 2))
    assert world.run() == 2


def test_a_failed_child_that_stays_is_stopped(world: World) -> None:
    world.then(reports(world.frontends[1], Failed("no tokenizer")))
    assert world.run() == 1
    grace = f"{STOP_GRACE_S:g} s later"
    assert world.after("DEAD")[0] == grace
    assert world.log.count(grace) == 2
    assert "SIGKILL to engine" in world.log


def test_a_child_that_dies_while_starting(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.then(ends(world.engine_child, -11))
    assert world.run() == 1
    assert capsys.readouterr().err == "streamserve: error: the engine ended with -11 while starting\n"


def test_a_start_that_takes_too_long(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.then(reports(world.frontends[0], Ready({})), reports(world.frontends[1], Ready({})))
    world.then(reports(world.engine_child, Progress("loading weights", 0.25)))
    assert world.run() == 1
    said = "--startup-timeout: the engine was not ready in 60 s; it was at: loading weights, 25%"
    assert capsys.readouterr().err == f"streamserve: error: {said}\n"


def test_a_signal_while_starting_stops_all_at_once(world: World) -> None:
    world.then(signals(INT)).then(*(ends(child, -TERM) for child in (world.engine_child, *world.frontends)))
    assert world.run() == 0
    assert "announce" not in world.log
    assert "DRAINING" not in world.log


def test_an_engine_that_dies_leaves_the_frontends_a_grace(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.serving().then(ends(world.engine_child, -9))
    assert world.run() == 1
    assert capsys.readouterr().err == "streamserve: error: the engine ended with -9\n"
    assert world.after("announce")[:3] == ["DEAD", "7 s later", "SIGUSR1 to frontend 0"]


def test_an_engine_that_stops_unasked_is_a_failure_too(world: World) -> None:
    world.serving().then(ends(world.engine_child, 0))
    assert world.run() == 1


def test_a_signal_cuts_the_grace_short(world: World) -> None:
    world.serving().then(ends(world.engine_child, -9)).then(signals(TERM))
    assert world.run() != 0
    assert world.after("announce") == ["DEAD", "SIGKILL to frontend 0", "SIGKILL to frontend 1"]


def test_a_frontend_that_dies_takes_the_server_along(world: World) -> None:
    first, second = world.frontends
    world.serving().then(ends(first, -9)).then(ends(second), ends(world.engine_child))
    assert world.run() == 1
    assert world.after("announce") == ["DEAD", "SIGUSR1 to engine", "SIGUSR1 to frontend 1", "DEAD"]


def test_frontends_that_do_not_finish_are_killed_and_the_engine_still_stops_in_order(world: World) -> None:
    world.serving().then(signals(TERM))
    assert world.run() == 0
    assert world.after("stop listening")[2:] == [
        f"{30 + DRAIN_MARGIN_S:g} s later",
        "SIGKILL to frontend 0",
        "SIGKILL to frontend 1",
        "SIGUSR1 to engine",
        f"{STOP_GRACE_S:g} s later",
        "SIGKILL to engine",
        "DEAD",
    ]


@pytest.mark.parametrize(("first", "second"), [(TERM, TERM), (INT, INT), (TERM, INT)])
def test_a_second_signal_kills_at_once(world: World, first: signal.Signals, second: signal.Signals) -> None:
    world.serving().then(signals(first)).then(signals(second)).then(signals(second))
    assert world.run() == 128 + second
    assert world.after("SIGUSR1 to frontend 1") == [
        "SIGKILL to engine",
        "SIGKILL to frontend 0",
        "SIGKILL to frontend 1",
        "DEAD",
    ]


@pytest.mark.parametrize(("code", "expected"), [(-9, 1), (0, 0)])
def test_an_engine_that_ends_while_streams_finish_is_published(
    world: World, code: int, expected: int
) -> None:
    world.serving().then(signals(TERM)).then(ends(world.engine_child, code))
    world.then(*(ends(child) for child in world.frontends))
    assert world.run() == expected
    assert world.after("SIGUSR1 to frontend 1") == ["DEAD"]


def test_a_signal_does_not_hide_an_end_of_the_same_moment(world: World) -> None:
    first, second = world.frontends
    world.serving().then(signals(TERM), ends(first)).then(ends(second)).then(ends(world.engine_child))
    assert world.run() == 0


def test_an_end_that_comes_with_a_signal_is_not_lost(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, (first, second) = world.engine_child, world.frontends
    world.serving().then(signals(TERM), ends(engine, -KILL)).then(ends(first), ends(second))
    assert world.run() == 1
    assert "DEAD" in world.after("announce")
    assert "the engine ended with -9 while streams were finishing" in capsys.readouterr().err


def test_two_signals_that_come_together_are_two(world: World) -> None:
    world.serving().then(signals(TERM), signals(TERM))
    assert world.run() == 128 + TERM


def test_a_frontend_killed_during_the_drain_is_no_clean_exit(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, (first, second) = world.engine_child, world.frontends
    world.serving().then(signals(TERM)).then(ends(first, -KILL), ends(second)).then(ends(engine))
    assert world.run() == 1
    assert "the frontend 0 ended with -9" in capsys.readouterr().err
