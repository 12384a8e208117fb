"""What all processes of a server take together, read from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/<pid>/stat.

    Attributes:
        pid: of the process.
        parent: pid.
        session: pid of the process that began its session.
        started: when, in ticks since the machine was; with the pid it tells a process from all others.
        is_zombie: it has ended, but was not waited for.
        cpu_s: processor seconds of the process and of those of its children that ended and were waited for.
    """

    pid: int
    parent: int
    session: int
    started: int
    is_zombie: bool
    cpu_s: float


def parse_stat(line: str) -> Process:
    """Reads a line of /proc/<pid>/stat; the name in it may hold spaces and brackets."""
    pid, _, rest = line.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    return Process(
        pid=int(pid),
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]),
        is_zombie=fields[0] == "Z",
        cpu_s=sum(map(int, fields[11:15])) / _TICKS,
    )


def still_running(processes: Iterable[Process]) -> list[Process]:
    """Those of them that have not ended since."""
    now = {(process.pid, process.started) for process in _processes() if not process.is_zombie}
    return [process for process in processes if (process.pid, process.started) in now]


class ProcessTree:
    """A process that leads a session, all that it started, and all that those started.

    Args:
        root: pid, which is also its session's.
    """

    def __init__(self, root: int) -> None:
        self._root = root

    def members(self) -> list[Process]:
        """All in the session, whoever their parent is by now, and all descendants, whatever their session."""
        everyone = {process.pid: process for process in _processes()}
        return [process for process in everyone.values() if self._has(process, everyone)]

    def cpu_s(self) -> float:
        """Processor seconds that they took so far, those that have ended included."""
        return sum(process.cpu_s for process in self.members())

    def pss_bytes(self) -> int:
        """Memory of all of them now: a page that n processes share counts 1/n for each."""
        return self._sum(lambda pid: _field(_PROC / str(pid) / "smaps_rollup", "Pss:"))

    def peak_rss_bytes(self) -> int:
        """Sum of each one's peak so far. Shared pages count for each: more than the server takes."""
        return self._sum(lambda pid: _field(_PROC / str(pid) / "status", "VmHWM:"))

    def _has(self, process: Process, everyone: dict[int, Process]) -> bool:
        if process.session == self._root:
            return True
        for _ in range(len(everyone)):
            if process.pid == self._root:
                return True
            parent = everyone.get(process.parent)
            if parent is None:
                return False
            process = parent
        return False

    def _sum(self, read: Callable[[int], int]) -> int:
        return sum(read(process.pid) for process in self.members())


def _processes() -> Iterator[Process]:
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            # It may end while its line is read.
            with contextlib.suppress(OSError):
                yield parse_stat((folder / "stat").read_text(errors="replace"))


def _field(path: Path, name: str) -> int:
    """Bytes that the line `name` of the file gives in kB; 0 for a process that has ended."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0
