"""Everything that the supervisor waits for, behind one call: signals, reports and ends of children."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from streamserve.supervisor.children import Child
from streamserve.supervisor.reports import Failed, Report

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# epoll counts milliseconds in 31 bits, and an operator may well ask for a drain of a year.
LONGEST_WAIT_S = 86400.0


@dataclass(frozen=True, slots=True)
class Signalled:
    """The operator asks to stop."""

    number: signal.Signals


@dataclass(frozen=True, slots=True)
class Reported:
    """A starting child said something."""

    child: Child
    report: Report


@dataclass(frozen=True, slots=True)
class Exited:
    """A child has ended and is reaped; it was watched until now."""

    child: Child


Event = Signalled | Reported | Exited


class Watch:
    """Waits for all of them without ever waking up for nothing. Belongs to the main thread.

    As a context manager it catches SIGINT and SIGTERM, and restores their handlers at the end.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup_read, self._wakeup_write = os.pipe()
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Watch:
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup_write)
        self._before = {number: signal.signal(number, _handled_by_wakeup) for number in STOP_SIGNALS}
        self._selector.register(self._wakeup_read, selectors.EVENT_READ, self._read_signals)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._selector.close()
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)

    def add(self, child: Child) -> None:
        """Watches `child` until it has ended."""
        self._selector.register(child.reports_fd, selectors.EVENT_READ, lambda: self._read_reports(child))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._bury(child))

    def wait(self, timeout_s: float | None) -> list[Event]:
        """What has happened, at the latest after `timeout_s` (or a day); None waits for as long as it takes.

        Signals come first, then reports, then ends: a child that says why it fails and exits is heard first.
        """
        limit_s = None if timeout_s is None else min(timeout_s, LONGEST_WAIT_S)
        ready: list[Callable[[], list[Event]]] = [key.data for key, _ in self._selector.select(limit_s)]
        return sorted((event for read in ready for event in read()), key=_precedence)

    def _read_signals(self) -> list[Event]:
        caught = [signal.Signals(number) for number in os.read(self._wakeup_read, 64)]
        return [Signalled(number) for number in caught if number in STOP_SIGNALS]

    def _read_reports(self, child: Child) -> list[Event]:
        if child.reports_fd not in self._selector.get_map():
            # Its end came in the same round, and what it had to say was read then.
            return []
        try:
            reports = child.read_reports()
        except ValueError as error:
            reports = [Failed(f"it sent {error}")]
        if reports is None:
            self._selector.unregister(child.reports_fd)
            return []
        return [Reported(child, report) for report in reports]

    def _bury(self, child: Child) -> list[Event]:
        child.reap()
        last_words: list[Event] = []
        while heard := self._read_reports(child):
            last_words += heard
        self._selector.unregister(child.pidfd)
        if child.reports_fd in self._selector.get_map():
            self._selector.unregister(child.reports_fd)
        child.close()
        return [*last_words, Exited(child)]


def _precedence(event: Event) -> int:
    return (Signalled, Reported, Exited).index(type(event))


def _handled_by_wakeup(_number: int, _frame: FrameType | None) -> None:
    """The handler must be ours for the wake-up descriptor to be written; it has nothing else to do."""
