"""The cores that a machine, an affinity and control groups leave to a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamserve.worker.host_cores import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_groups_it_is_those_it_may_run_on(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("20000 100000", 1),
        ("25000 10000", 2),
        ("6400000 100000", 8),
    ],
)
def test_the_quota_of_a_container(tmp_path: Path, limit: str, cores: int) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", f"{limit}\n")
    assert usable_cores(tmp_path) == cores


def test_the_tightest_group_of_the_path_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/app\n")
    write(tmp_path / "sys/fs/cgroup/pod/cpu.max", "300000 100000\n")
    write(tmp_path / "sys/fs/cgroup/pod/app/cpu.max", "max 100000\n")
    assert usable_cores(tmp_path) == 3


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("400000", 4)])
def test_version_one(tmp_path: Path, quota: str, cores: int) -> None:
    write(tmp_path / "proc/self/cgroup", "3:cpu,cpuacct:/docker/abc\n0::/x\n")
    # A container's own view: the group is at the mount, whatever it is called outside.
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", f"{quota}\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert usable_cores(tmp_path) == cores
