"""What a starting child says on its ready pipe, and how it is shown to the operator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """The child is busy starting: with what, and how far it is, from 0 to 1."""

    what: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The child serves; `facts` are for the operator to read."""

    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The child cannot start, and why, in one line."""

    message: str


Report = Progress | Ready | Failed


class ReportDecoder:
    """Turns the bytes of a ready pipe into reports, however they were cut."""

    def __init__(self) -> None:
        self._rest = b""

    def decode(self, data: bytes) -> list[Report]:
        """The reports that `data` completes.

        Raises:
            ValueError: a line is no report.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_parse(line) for line in lines]


def _parse(line: bytes) -> Report:
    match json.loads(line):
        case {"type": "progress", "what": str(what), "fraction": int() | float() as fraction}:
            return Progress(what, float(fraction))
        case {"type": "ready", "facts": dict(facts)}:
            return Ready(facts)
        case {"type": "failed", "message": str(message)}:
            return Failed(" ".join(message.split()))
    raise ValueError(f"not a start-up report: {line!r}")


class ProgressLog:
    """Shows progress without flooding a log: each new stage at once, then at most a line an interval.

    Args:
        emit: writes one line.
        interval_s: least time between two lines of one stage.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        emit: Callable[[str], None],
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._interval_s = interval_s
        self._clock = clock
        # source → stage, line and time of what was shown last
        self._shown: dict[str, tuple[str, str, float]] = {}
        self._latest: dict[str, str] = {}

    def report(self, source: str, what: str, fraction: float) -> None:
        """Takes note that `source` is at `fraction` of `what`."""
        now = self._clock()
        line = f"{what}, {fraction:.0%}" if fraction > 0 else what
        self._latest[source] = line
        stage, shown, shown_at = self._shown.get(source, ("", "", 0.0))
        if what != stage or (line != shown and now - shown_at >= self._interval_s):
            self._shown[source] = (what, line, now)
            self._emit(f"{source}: {line}")

    def latest(self, source: str) -> str | None:
        """What `source` said last."""
        return self._latest.get(source)
