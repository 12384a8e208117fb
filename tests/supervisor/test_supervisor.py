"""What the supervisor decides, against fake children; test_processes.py has real ones."""

from __future__ import annotations

import signal

import pytest
from supervisor.world import ANNOUNCED, INT, KILL, MODEL, TERM, World, ends, reports, signals, stopped

from streamserve.supervisor.reports import Failed, Progress, Ready
from streamserve.supervisor.supervisor import DRAIN_MARGIN_S, HEAD_START_S, STOP_GRACE_S
from streamserve.supervisor.watch import Event


@pytest.fixture
def world() -> World:
    return World(startup_timeout=60, drain_timeout=30, engine_failure_grace=7)


def test_ready_is_published_with_the_engine_and_announced_with_all(world: World) -> None:
    engine, (first, second) = world.engine_child, world.frontends
    world.then(reports(world.model_child, Progress("converting", 0.5))).with_model()
    world.then(reports(first, Ready({})), reports(engine, Progress("loading weights", 0.1)))
    world.then(reports(engine, Ready({"num_blocks": 7}))).then(reports(second, Ready({})))
    world.then(signals(TERM)).then(ends(first), ends(second)).then(ends(engine))
    assert world.run() == 0
    assert world.log == [
        "STARTING",
        "start model process",
        "converting 50%",
        "start engine, epoch 1",
        "start frontend 0",
        "start frontend 1",
        "model tiny at /models/tiny",
        "loading weights 10%",
        "READY",
        "announce tiny",
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


def test_a_model_that_is_there_is_found_before_the_others_start(world: World) -> None:
    assert stopped(world.serving()).run() == 0
    assert world.log[1:4] == ["start model process", "model tiny at /models/tiny", "start engine, epoch 1"]


def test_the_others_start_in_a_while_even_if_nothing_is_heard_of_the_model(world: World) -> None:
    world.then().serving()
    assert stopped(world).run() == 0
    assert world.log[2:5] == [f"{HEAD_START_S:g} s later", "start engine, epoch 1", "start frontend 0"]


def test_a_model_may_take_as_long_as_it_takes_and_a_start_may_not(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def much_later() -> Event:
        world.now_s += 10_000
        return reports(world.model_child, Progress("fetching", 0.5))()

    world.then(much_later).with_model()
    assert world.run() == 1
    assert "60 s later" in world.after("model tiny at /models/tiny")
    assert "--startup-timeout: the engine was not ready in 60 s" in capsys.readouterr().err


def test_a_model_that_is_not_to_be_had_is_exit_code_2(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.then(reports(world.model_child, Failed("MODEL x: no such file"))).then(ends(world.model_child, 2))
    assert world.run() == 2
    assert capsys.readouterr().err == "streamserve: error: MODEL x: no such file\n"
    assert not any("frontend" in entry for entry in world.log)


def test_a_model_process_that_dies(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.then(ends(world.model_child, -KILL))
    assert world.run() == 1
    said = "the model process ended with -9 while starting"
    assert capsys.readouterr().err == f"streamserve: error: {said}\n"


def test_a_signal_while_the_model_is_on_its_way_stops_all(world: World) -> None:
    world.then(reports(world.model_child, Progress("fetching", 0.0))).then(signals(TERM))
    world.then(*(ends(child, -10) for child in (world.model_child, world.engine_child, *world.frontends)))
    assert world.run() == 0
    stopped = ["model process", "engine", "frontend 0", "frontend 1"]
    assert world.after("start frontend 1") == [*(f"SIGUSR1 to {name}" for name in stopped), "DEAD"]


def test_a_server_does_not_serve_before_the_model_process_has_ended(world: World) -> None:
    world.then(reports(world.model_child, Ready(MODEL)))
    for child in (*world.frontends, world.engine_child):
        world.then(reports(child, Ready({})))
    world.then(ends(world.model_child))
    world.then(signals(TERM)).then(*(ends(child) for child in world.frontends)).then(ends(world.engine_child))
    assert world.run() == 0
    assert world.after("READY")[0] == ANNOUNCED


def test_a_child_that_cannot_start_is_heard_and_ends_by_itself(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, (first, second) = world.engine_child, world.frontends
    world.with_model().then(reports(engine, Failed("too little memory"))).then(ends(engine, 1))
    world.then(ends(first), ends(second))
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
    world.with_model().then(reports(engine, Failed("--dtype"))).then(ends(engine, 2))
    assert world.run() == 2


def test_a_failed_child_that_stays_is_stopped(world: World) -> None:
    world.with_model().then(reports(world.frontends[1], Failed("no tokenizer")))
    assert world.run() == 1
    grace = f"{STOP_GRACE_S:g} s later"
    assert world.after("DEAD")[0] == grace
    assert world.log.count(grace) == 2
    assert "SIGKILL to engine" in world.log


def test_a_child_that_dies_while_starting(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.with_model().then(ends(world.engine_child, -11))
    assert world.run() == 1
    assert capsys.readouterr().err == "streamserve: error: the engine ended with -11 while starting\n"


def test_a_start_that_takes_too_long(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.with_model()
    world.then(reports(world.frontends[0], Ready({})), reports(world.frontends[1], Ready({})))
    world.then(reports(world.engine_child, Progress("loading weights", 0.25)))
    assert world.run() == 1
    said = "--startup-timeout: the engine was not ready in 60 s; it was at: loading weights, 25%"
    assert capsys.readouterr().err == f"streamserve: error: {said}\n"


def test_a_signal_while_starting_stops_all_at_once(world: World) -> None:
    world.with_model().then(signals(INT))
    world.then(*(ends(child, -TERM) for child in (world.engine_child, *world.frontends)))
    assert world.run() == 0
    assert ANNOUNCED not in world.log
    assert "DRAINING" not in world.log


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


def test_a_signal_does_not_hide_an_end_of_the_same_moment(world: World) -> None:
    first, second = world.frontends
    world.serving().then(signals(TERM), ends(first)).then(ends(second)).then(ends(world.engine_child))
    assert world.run() == 0


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
