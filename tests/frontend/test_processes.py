"""What /proc says of a process, and what is left where it says less."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import psutil
import pytest

from streamserve.frontend import processes
from streamserve.frontend.processes import ProcessFiles

NAMES = {family.name for family in processes.FAMILIES}
PID = 7
STAT = f"{PID} (a ) (b) S 1 7 7 0 -1 4194304 98 0 0 0 150 50 0 0 20 0 1 0 1200 3133440 389 1844674407370955"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with one process."""
    folder = tmp_path / str(PID)
    (folder / "fd").mkdir(parents=True)
    for number in range(5):
        (folder / "fd" / str(number)).touch()
    (tmp_path / "stat").write_text("cpu  1 2 3\nintr 1\nctxt 4\nbtime 1700000000\nprocesses 5\n")
    (folder / "stat").write_text(STAT)
    limits = "Limit                     Soft Limit           Hard Limit           Units\n"
    limits += "Max processes             100                  200                  processes\n"
    (folder / "limits").write_text(
        limits + "Max open files            1024                 4096                 files\n"
    )
    return tmp_path


def test_this_process_is_as_another_reader_sees_it() -> None:
    started_s = time.process_time()
    numbers = ProcessFiles().read(os.getpid())
    other = psutil.Process()
    assert set(numbers) == NAMES
    assert started_s - 0.1 <= numbers["process_cpu_seconds"] <= time.process_time()
    assert numbers["process_start_time_seconds"] == pytest.approx(other.create_time(), abs=1)
    assert numbers["process_virtual_memory_bytes"] == pytest.approx(other.memory_info().vms, rel=0.5)
    assert numbers["process_resident_memory_bytes"] == pytest.approx(other.memory_info().rss, rel=0.5)
    assert numbers["process_open_fds"] == pytest.approx(other.num_fds(), abs=5)
    assert numbers["process_max_fds"] == other.rlimit(psutil.RLIMIT_NOFILE)[0]


def test_numbers_have_the_units_of_their_names(proc: Path) -> None:
    ticks_per_s, page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    assert ProcessFiles(proc).read(PID) == {
        "process_cpu_seconds": 200 / ticks_per_s,
        "process_start_time_seconds": 1_700_000_000 + 1200 / ticks_per_s,
        "process_virtual_memory_bytes": 3_133_440,
        "process_resident_memory_bytes": 389 * page_bytes,
        "process_open_fds": 5,
        "process_max_fds": 1024,
    }


def test_there_may_be_no_limit(proc: Path) -> None:
    (proc / str(PID) / "limits").write_text(
        "Max open files            unlimited            unlimited            files\n"
    )
    assert ProcessFiles(proc).read(PID)["process_max_fds"] == math.inf


def test_of_a_process_that_is_gone_there_are_no_numbers(proc: Path) -> None:
    assert ProcessFiles(proc).read(PID + 1) == {}


def test_without_proc_there_are_none_either(tmp_path: Path) -> None:
    assert ProcessFiles(tmp_path / "proc").read(os.getpid()) == {}


@pytest.mark.parametrize(
    ("file", "lost"),
    [
        ("stat", {"process_start_time_seconds"}),
        ("7/stat", NAMES - {"process_open_fds", "process_max_fds"}),
        ("7/limits", {"process_max_fds"}),
    ],
)
@pytest.mark.parametrize(
    "text", ["", "7 (x", "btime\nMax open files\n", "7 (x) S 1 2\nMax open files x\nbtime x"]
)
def test_a_file_that_cannot_be_read_costs_its_own_numbers_alone(
    proc: Path, file: str, lost: set[str], text: str
) -> None:
    (proc / file).write_text(text)
    assert set(ProcessFiles(proc).read(PID)) == NAMES - lost


def test_a_folder_of_descriptors_may_be_somebody_elses(proc: Path) -> None:
    for path in (proc / str(PID) / "fd").iterdir():
        path.unlink()
    (proc / str(PID) / "fd").rmdir()
    assert set(ProcessFiles(proc).read(PID)) == NAMES - {"process_open_fds"}
