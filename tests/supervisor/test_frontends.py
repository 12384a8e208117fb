"""What becomes of frontends that die, against fake ones; tests/chaos has real ones."""

from __future__ import annotations

import signal

import pytest
from supervisor.world import (
    ANNOUNCED,
    TERM,
    World,
    dies,
    ends,
    engine_dies,
    engine_says,
    is_ready,
    says,
    signals,
    stopped,
)

from streamserve.ipc.layout import RingCorrupted
from streamserve.supervisor.frontends import RETRY_S
from streamserve.supervisor.reports import Failed, Ready
from streamserve.supervisor.restarts import FIRST_DELAY_S, FORGIVEN_AFTER_S, LONGEST_DELAY_S
from streamserve.supervisor.watch import Event


@pytest.fixture
def world() -> World:
    return World(startup_timeout=60, drain_timeout=30, engine_failure_grace=7)


def test_a_frontend_that_dies_is_followed_by_another_at_once(world: World) -> None:
    world.serving().then(dies(world)).then(is_ready(world))
    assert stopped(world).run() == 0
    assert world.after(ANNOUNCED)[:3] == ["hand over 0, epoch 1", "start frontend 0", "DRAINING"]
    assert world.now_s == 0


def test_one_that_stops_unasked_is_followed_too(world: World) -> None:
    world.serving().then(dies(world, 1, 0)).then(is_ready(world, 1))
    assert stopped(world).run() == 0
    assert world.after(ANNOUNCED)[:2] == ["hand over 1, epoch 1", "start frontend 1"]


def test_nobody_starts_before_the_engine_knows(world: World) -> None:
    world.handovers = [False] * 3
    world.serving().then(dies(world))
    world.then().then().then().then(is_ready(world))
    assert stopped(world).run() == 0
    waiting = ["no room in ring 0", f"{RETRY_S:g} s later"]
    assert world.after(ANNOUNCED)[:8] == [*waiting * 3, "hand over 0, epoch 1", "start frontend 0"]


def test_one_that_dies_again_and_again_starts_later_and_later() -> None:
    world = World(max_frontend_restarts=7)
    world.serving().then(dies(world))
    for _ in range(6):
        world.then(dies(world)).then()
    world.then(is_ready(world))
    assert stopped(world).run() == 0
    waits = [entry for entry in world.after(ANNOUNCED) if entry.endswith("later")]
    delays_s = [*(FIRST_DELAY_S * factor for factor in (1, 2, 4, 8, 16)), LONGEST_DELAY_S]
    assert waits == [f"{delay_s:g} s later" for delay_s in delays_s]


def test_one_that_dies_too_often_ends_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(max_frontend_restarts=2)
    world.serving().then(dies(world)).then(dies(world)).then().then(is_ready(world), dies(world))
    world.then(dies(world, 1, 0), ends(world.engine_child))
    assert world.run() == 1
    assert world.log.count("start frontend 0") == 3
    said = "the frontend 0 ended with -9, after 2 restarts in a row (--max-frontend-restarts)"
    assert capsys.readouterr().err == f"streamserve: error: {said}\n"
    assert world.after("DEAD") == ["SIGUSR1 to engine", "SIGUSR1 to frontend 1", "DEAD"]


def test_each_frontend_has_restarts_of_its_own() -> None:
    world = World(max_frontend_restarts=1)
    world.serving().then(dies(world, 0), dies(world, 1)).then(is_ready(world, 0), is_ready(world, 1))
    assert stopped(world).run() == 0


def test_no_restarts_may_be_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(max_frontend_restarts=0)
    world.serving().then(dies(world)).then(dies(world, 1, 0), ends(world.engine_child))
    assert world.run() == 1
    said = "the frontend 0 ended with -9 (--max-frontend-restarts)"
    assert capsys.readouterr().err == f"streamserve: error: {said}\n"


def test_deaths_of_long_ago_are_forgiven() -> None:
    world = World(max_frontend_restarts=1)

    def dies_much_later() -> Event:
        world.now_s += FORGIVEN_AFTER_S
        return dies(world)()

    world.serving()
    for _ in range(5):
        world.then(dies_much_later).then(is_ready(world))
    assert stopped(world).run() == 0
    assert not [entry for entry in world.log if entry.endswith("later")]


def test_a_start_that_takes_long_is_no_life() -> None:
    world = World(max_frontend_restarts=1, startup_timeout=2 * FORGIVEN_AFTER_S)

    def dies_much_later() -> Event:
        world.now_s += FORGIVEN_AFTER_S
        return dies(world)()

    world.serving().then(dies(world)).then(dies_much_later)
    world.then(dies(world, 1, 0), ends(world.engine_child))
    assert world.run() == 1


def test_a_successor_that_hangs_is_killed_and_counts(world: World) -> None:
    world.serving().then(dies(world))
    assert world.run() == 1
    assert world.after(ANNOUNCED)[:4] == [
        "hand over 0, epoch 1",
        "start frontend 0",
        "60 s later",
        "SIGKILL to frontend 0",
    ]
    assert world.log.count("start frontend 0") == 6


def test_a_successor_that_cannot_start_is_heard_and_counts(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(max_frontend_restarts=1)
    world.serving().then(dies(world)).then(says(world, 0, Failed("no tokenizer")))
    world.then(dies(world, 0, 2)).then(dies(world, 1, 0), ends(world.engine_child))
    assert world.run() == 1
    assert "the frontend 0 cannot start: no tokenizer" in caplog.text
    assert "the frontend 0 ended with 2, after 1 restarts" in capsys.readouterr().err


def test_processes_that_cannot_be_started_count(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(max_frontend_restarts=3)

    def dies_of_want() -> Event:
        world.refuses_to_start = True
        return dies(world)()

    world.serving().then(dies_of_want).then().then().then(dies(world, 1, 0), ends(world.engine_child))
    world.now_s = 1.0
    assert world.run() == 1
    assert "could not be started: out of processes, after 3 restarts" in capsys.readouterr().err


def test_a_damaged_ring_ends_the_server(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.handovers = [RingCorrupted("tail 9")]
    world.serving().then(dies(world)).then(dies(world, 1, 0), ends(world.engine_child))
    assert world.run() == 1
    assert capsys.readouterr().err == "streamserve: error: the frontend 0 left its channel damaged: tail 9\n"


def test_while_streams_finish_nobody_is_started(world: World) -> None:
    world.serving().then(dies(world), signals(TERM)).then(dies(world, 1, 0)).then(ends(world.engine_child))
    assert world.run() == 0
    assert world.log.count("start frontend 0") == 1
    assert world.after("stop listening") == ["SIGUSR1 to frontend 1", "SIGUSR1 to engine", "DEAD"]


def test_a_successor_that_is_starting_has_no_streams_to_lose(world: World) -> None:
    world.serving().then(dies(world)).then(signals(TERM))
    world.then(dies(world, 0, -signal.SIGUSR1), dies(world, 1, 0)).then(ends(world.engine_child))
    assert world.run() == 0
    assert "SIGUSR1 to frontend 0" in world.after("stop listening")


def test_an_engine_that_dies_while_a_frontend_is_gone(world: World) -> None:
    world.serving().then(dies(world), engine_dies(world))
    world.then(engine_says(world, Ready({})), is_ready(world))
    assert stopped(world).run() == 0
    # The next engine is told of the next frontend, by its start or by this.
    starts = ["starting the engine again 0%", "STARTING", "start engine, epoch 2"]
    assert world.after(ANNOUNCED)[:6] == [*starts, "hand over 0, epoch 2", "start frontend 0", "READY"]
