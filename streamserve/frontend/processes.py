"""What the kernel says of the processes of this server: processor time, memory, descriptors.

Names and meanings are those of Prometheus' own client libraries.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from streamserve.frontend.families import Family, Kind

PROC = Path("/proc")

_CPU, _START = "process_cpu_seconds", "process_start_time_seconds"
_VIRTUAL, _RESIDENT = "process_virtual_memory_bytes", "process_resident_memory_bytes"
_OPEN_FDS, _MAX_FDS = "process_open_fds", "process_max_fds"
FAMILIES = (
    Family(_CPU, Kind.COUNTER, "Processor time used, of user and system."),
    Family(_START, Kind.GAUGE, "When the process started, in seconds since 1970."),
    Family(_VIRTUAL, Kind.GAUGE, "Addresses in use."),
    Family(_RESIDENT, Kind.GAUGE, "Memory in use; what processes share counts in each of them."),
    Family(_OPEN_FDS, Kind.GAUGE, "Open descriptors."),
    Family(_MAX_FDS, Kind.GAUGE, "Descriptors that may be open."),
)

# Fields of /proc/PID/stat from the third on, which follows the name in brackets.
_USER_TICKS, _SYSTEM_TICKS, _START_TICKS, _VIRTUAL_BYTES, _RESIDENT_PAGES = 11, 12, 19, 20, 21
_LIMIT = "Max open files"

_Part = Callable[[Path], Iterator[tuple[str, float]]]


def server_processes(
    supervisor: int | None, engine: int | None, frontends: Sequence[int]
) -> Iterator[tuple[str, int]]:
    """What each process of a server is called, and its id.

    Args:
        supervisor, engine: their ids; None where there is none.
        frontends: their ids; 0 where there is none yet.
    """
    if supervisor is not None:
        yield "supervisor", supervisor
    if engine is not None:
        yield "engine", engine
    for index, pid in enumerate(frontends):
        if pid:
            yield f"frontend-{index}", pid


class ProcessFiles:
    """Reads /proc. Its files are made as they are read: no disk is waited for.

    Args:
        root: where it is.
    """

    def __init__(self, root: Path = PROC) -> None:
        self._root = root
        self._booted_s: float | None = None
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = (root / "stat").read_text().splitlines()
            self._booted_s = next(float(line.split()[1]) for line in lines if line.startswith("btime "))

    def read(self, pid: int) -> Mapping[str, float]:
        """The numbers of a process by the names of their families, without those that cannot be had.

        There are none of a process that is gone, or on a system without /proc.
        """
        return self._read(pid, (self._statistics, self._descriptors, self._limit))

    def usage(self, pid: int) -> tuple[float, float] | None:
        """Seconds of processor time so far, and bytes of memory now; None of a process that is gone.

        Costs one small file, however many descriptors are open.
        """
        numbers = self._read(pid, (self._statistics,))
        return (numbers[_CPU], numbers[_RESIDENT]) if _RESIDENT in numbers else None

    def _read(self, pid: int, parts: Iterable[_Part]) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for part in parts:
            # ValueError and IndexError: not the format that is known.
            with contextlib.suppress(OSError, ValueError, IndexError):
                numbers.update(part(self._root / str(pid)))
        return numbers

    def _statistics(self, folder: Path) -> Iterator[tuple[str, float]]:
        # The name may hold anything, brackets and blanks too.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        ticks_per_s, page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        yield _CPU, (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / ticks_per_s
        yield _VIRTUAL, int(fields[_VIRTUAL_BYTES])
        yield _RESIDENT, int(fields[_RESIDENT_PAGES]) * page_bytes
        if self._booted_s is not None:
            yield _START, self._booted_s + int(fields[_START_TICKS]) / ticks_per_s

    @staticmethod
    def _descriptors(folder: Path) -> Iterator[tuple[str, float]]:
        yield _OPEN_FDS, len(os.listdir(folder / "fd"))

    @staticmethod
    def _limit(folder: Path) -> Iterator[tuple[str, float]]:
        for line in (folder / "limits").read_text().splitlines():
            if line.startswith(_LIMIT):
                soft = line.removeprefix(_LIMIT).split()[0]
                yield _MAX_FDS, math.inf if soft == "unlimited" else int(soft)
