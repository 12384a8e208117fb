"""The status board: what is published is what everybody reads, whole."""

from __future__ import annotations

import pytest

from streamserve.ipc.board import EngineState, StatusBoard


def test_a_new_board_shows_a_starting_engine() -> None:
    with StatusBoard.create() as board:
        assert board.read() == (0, EngineState.STARTING)


@pytest.mark.parametrize("state", EngineState)
@pytest.mark.parametrize("epoch", [1, (1 << 56) - 1])
def test_readers_see_what_is_published(epoch: int, state: EngineState) -> None:
    with StatusBoard.create() as board, StatusBoard.attach(board.fd) as reader:
        board.publish(epoch, state)
        assert reader.read() == (epoch, state)


def test_an_epoch_that_does_not_fit_changes_nothing() -> None:
    with StatusBoard.create() as board:
        board.publish(1, EngineState.READY)
        with pytest.raises(ValueError):
            board.publish(1 << 56, EngineState.READY)
        assert board.read() == (1, EngineState.READY)


def test_close_twice_is_close_once() -> None:
    board = StatusBoard.create()
    board.close()
    board.close()


def test_no_state_is_torn(spawn) -> None:
    with StatusBoard.create() as board:
        seen = {board.read()}
        spawn("flip_board.py", [board.fd])
        while len(seen) < 3:
            seen.add(board.read())
        for _ in range(100_000):
            seen.add(board.read())
    assert seen == {(0, EngineState.STARTING), (1, EngineState.READY), (1 << 48, EngineState.DEAD)}
