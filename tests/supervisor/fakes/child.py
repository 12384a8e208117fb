"""What the fake children have in common."""

from __future__ import annotations

import os
import signal
import threading
from typing import NoReturn

from streamserve.bootstrap import STOP_ORDER, Bootstrap, ReadyPipe
from streamserve.ipc.board import EngineState, StatusBoard
from streamserve.ipc.doorbell import Doorbell
from streamserve.lifeline import watch_lifeline

MODEL = {"path": "/nowhere", "name": "fake", "dtype": "float32", "load_format": "dummy"}


def say(line: str) -> None:
    """Writes a line at once, whole, so that those of several processes do not mix."""
    os.write(1, line.encode() + b"\n")


def begin() -> tuple[Bootstrap, ReadyPipe]:
    """What every child does first."""
    bootstrap = Bootstrap.from_argv()
    watch_lifeline(bootstrap.lifeline)
    return bootstrap, ReadyPipe(bootstrap.ready)


def report_ready(bootstrap: Bootstrap, ready: ReadyPipe) -> None:
    """Says `ready`, with what the tests want to know of this process."""
    say(f"{bootstrap.role} {bootstrap.index} pid {os.getpid()} lifeline {bootstrap.lifeline}")
    ready.ready({"descriptors": len(bootstrap.descriptors())})


def exit_on_order(name: str) -> None:
    """Says when the order to stop comes, and ends."""

    def stop(*_: object) -> None:
        say(f"{name} stops")
        os._exit(0)

    signal.signal(STOP_ORDER, stop)


def follow_board(bootstrap: Bootstrap) -> NoReturn:
    """Says what the status board shows, for ever."""
    board = StatusBoard.attach(bootstrap.board)
    bell = Doorbell.attach(bootstrap.channels[0].frontend_bell)
    shown = None
    while True:
        _, state = board.read()
        if state != shown:
            shown = state
            say(f"frontend {bootstrap.index} sees {EngineState(state).name}")
        bell.wait(None)


def sleep_for_ever() -> NoReturn:
    """Does nothing, but hears signals."""
    while True:
        threading.Event().wait()
