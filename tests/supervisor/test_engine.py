"""What becomes of an engine that dies, against fake ones; tests/chaos has real ones."""

from __future__ import annotations

import pytest
from supervisor.world import (
    ANNOUNCED,
    KILL,
    TERM,
    World,
    dies,
    ends,
    engine_dies,
    engine_says,
    signals,
    stopped,
)

from streamserve.supervisor.reports import Failed, Progress, Ready
from streamserve.supervisor.restarts import FIRST_DELAY_S, FORGIVEN_AFTER_S, LONGEST_DELAY_S
from streamserve.supervisor.watch import Event

LOST = ["starting the engine again 0%", "STARTING"]


@pytest.fixture
def world() -> World:
    return World(startup_timeout=60, drain_timeout=30, engine_failure_grace=7)


@pytest.mark.parametrize("code", [-KILL, 0, 1])
def test_an_engine_that_ends_is_followed_by_another_at_once(world: World, code: int) -> None:
    world.serving().then(engine_dies(world, code))
    world.then(engine_says(world, Progress("loading weights", 0.5))).then(engine_says(world, Ready({})))
    assert stopped(world).run() == 0
    assert world.after(ANNOUNCED)[:5] == [*LOST, "start engine, epoch 2", "loading weights 50%", "READY"]
    assert world.now_s == 0


def test_one_that_dies_again_and_again_starts_later_and_later() -> None:
    world = World(max_engine_restarts=7)
    world.serving().then(engine_dies(world))
    for _ in range(6):
        world.then(engine_dies(world)).then()
    world.then(engine_says(world, Ready({})))
    assert stopped(world).run() == 0
    waits = [entry for entry in world.after(ANNOUNCED) if entry.endswith("later")]
    delays_s = [*(FIRST_DELAY_S * factor for factor in (1, 2, 4, 8, 16)), LONGEST_DELAY_S]
    assert waits == [f"{delay_s:g} s later" for delay_s in delays_s]
    assert [entry for entry in world.log if entry.startswith("start engine")] == [
        f"start engine, epoch {epoch}" for epoch in range(1, 9)
    ]


def test_one_that_dies_too_often_is_given_up_and_leaves_the_frontends_a_grace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World(max_engine_restarts=1, engine_failure_grace=7)
    world.serving().then(engine_dies(world)).then(engine_dies(world))
    assert world.run() == 1
    said = "the engine ended with -9, after 1 restarts in a row (--max-engine-restarts)"
    assert capsys.readouterr().err == f"streamserve: error: {said}\n"
    assert world.after("start engine, epoch 2")[:3] == ["DEAD", "7 s later", "SIGUSR1 to frontend 0"]


def test_no_restarts_may_be_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(max_engine_restarts=0, engine_failure_grace=7)
    world.serving().then(engine_dies(world))
    assert world.run() == 1
    said = "streamserve: error: the engine ended with -9 (--max-engine-restarts)"
    assert capsys.readouterr().err == f"{said}\n"
    assert world.after(ANNOUNCED)[:3] == ["DEAD", "7 s later", "SIGUSR1 to frontend 0"]


def test_a_signal_cuts_the_grace_short() -> None:
    world = World(max_engine_restarts=0)
    world.serving().then(engine_dies(world)).then(signals(TERM))
    assert world.run() != 0
    assert world.after(ANNOUNCED) == ["DEAD", "SIGKILL to frontend 0", "SIGKILL to frontend 1"]


def test_deaths_of_long_ago_are_forgiven() -> None:
    world = World(max_engine_restarts=1)

    def dies_much_later() -> Event:
        world.now_s += FORGIVEN_AFTER_S
        return engine_dies(world)()

    world.serving()
    for _ in range(5):
        world.then(dies_much_later).then(engine_says(world, Ready({})))
    assert stopped(world).run() == 0
    assert not [entry for entry in world.log if entry.endswith("later")]


def test_to_load_for_long_is_not_to_serve() -> None:
    world = World(max_engine_restarts=1, startup_timeout=2 * FORGIVEN_AFTER_S)

    def ready_much_later() -> Event:
        world.now_s += FORGIVEN_AFTER_S
        return engine_says(world, Ready({}))()

    world.serving().then(engine_dies(world)).then(ready_much_later).then(engine_dies(world))
    world.then(dies(world, 0, 0), dies(world, 1, 0))
    assert world.run() == 1


def test_a_successor_that_hangs_is_killed_and_counts(world: World) -> None:
    world.serving().then(engine_dies(world))
    assert world.run() == 1
    assert world.after("start engine, epoch 2")[:2] == ["60 s later", "SIGKILL to engine"]
    assert len([entry for entry in world.log if entry.startswith("start engine")]) == 6


def test_a_successor_that_cannot_start_is_heard_and_counts(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(max_engine_restarts=1)
    world.serving().then(engine_dies(world)).then(engine_says(world, Failed("no memory")))
    world.then(engine_dies(world, 1)).then(dies(world, 0, 0), dies(world, 1, 0))
    assert world.run() == 1
    assert "the engine cannot start: no memory" in caplog.text
    assert "the engine ended with 1, after 1 restarts" in capsys.readouterr().err


def test_the_last_words_of_one_that_served_are_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.serving().then(engine_says(world, Failed("the engine failed: no such row")), engine_dies(world, 1))
    world.then(engine_says(world, Ready({})))
    assert stopped(world).run() == 0
    assert "the engine says why it ends: the engine failed: no such row" in caplog.text


def test_processes_that_cannot_be_started_count(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(max_engine_restarts=2)

    def dies_of_want() -> Event:
        world.refuses_to_start = True
        return engine_dies(world)()

    world.serving().then(dies_of_want).then().then(dies(world, 0, 0), dies(world, 1, 0))
    assert world.run() == 1
    assert "could not be started: out of processes, after 2 restarts" in capsys.readouterr().err


def test_one_that_dies_while_streams_finish_is_followed_too(world: World) -> None:
    world.serving().then(signals(TERM)).then(engine_dies(world)).then(engine_says(world, Ready({})))
    world.then(dies(world, 0, 0), dies(world, 1, 0)).then(engine_dies(world, 0))
    assert world.run() == 0
    assert world.after("SIGUSR1 to frontend 1") == [
        "starting the engine again 0%",
        "DRAINING",
        "start engine, epoch 2",
        # Ready, and needed for nothing else.
        "DRAINING",
        "SIGUSR1 to engine",
        "DEAD",
    ]


def test_a_server_that_is_to_stop_while_there_is_no_engine_starts_one_for_its_streams(world: World) -> None:
    world.serving().then(engine_dies(world)).then(engine_dies(world)).then(signals(TERM)).then()
    world.then(engine_says(world, Ready({}))).then(dies(world, 0, 0), dies(world, 1, 0))
    world.then(engine_dies(world, 0))
    assert world.run() == 0
    assert "start engine, epoch 3" in world.after("stop listening")


def test_an_end_that_comes_with_a_signal_is_not_lost(world: World) -> None:
    world.serving().then(signals(TERM), engine_dies(world)).then(engine_says(world, Ready({})))
    world.then(dies(world, 0, 0), dies(world, 1, 0)).then(engine_dies(world, 0))
    assert world.run() == 0
    assert "start engine, epoch 2" in world.after("stop listening")


@pytest.mark.parametrize("code", [-KILL, 0])
def test_one_that_is_given_up_while_streams_finish(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(max_engine_restarts=0)
    world.serving().then(signals(TERM)).then(engine_dies(world, code))
    world.then(*(ends(child) for child in world.frontends))
    assert world.run() == 1
    assert world.after("SIGUSR1 to frontend 1") == ["DEAD"]
    said = f"the engine ended with {code} (--max-engine-restarts) while streams were finishing"
    assert capsys.readouterr().err == f"streamserve: error: {said}\n"


def test_a_starting_engine_that_nobody_needs_any_more_is_stopped(world: World) -> None:
    world.serving().then(signals(TERM), engine_dies(world)).then(dies(world, 0, 0), dies(world, 1, 0))
    world.then(engine_dies(world, -10))
    assert world.run() == 0
    assert world.after("start engine, epoch 2") == ["SIGUSR1 to engine", "DEAD"]


def test_a_frontend_that_dies_while_there_is_no_engine_is_followed(world: World) -> None:
    world.serving().then(engine_dies(world)).then(engine_dies(world)).then(dies(world, 1))
    world.then().then(engine_says(world, Ready({})))
    assert stopped(world).run() == 0
    # Of the engine that comes: what was sent to the last one is for nobody.
    assert "hand over 1, epoch 3" in world.log
