"""Publishes two states in turns until killed: `BOARD`."""

from __future__ import annotations

import sys

from streamserve.ipc.board import EngineState, StatusBoard


def main() -> None:
    board = StatusBoard.attach(int(sys.argv[1]))
    while True:
        board.publish(1, EngineState.READY)
        board.publish(1 << 48, EngineState.DEAD)


if __name__ == "__main__":
    main()
