"""Free memory as the machine and its control groups tell it."""

from __future__ import annotations

from pathlib import Path

from streamserve.host_memory import available_bytes

MIB = 2**20


def machine(root: Path, available_kib: int, cgroup: str) -> None:
    write(root / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n")
    write(root / "proc/self/cgroup", cgroup)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_machine_without_groups(tmp_path: Path) -> None:
    machine(tmp_path, 1000 * 1024, "0::/user/app\n")
    assert available_bytes(tmp_path) == 1000 * MIB


def test_the_tightest_group_of_the_path_counts(tmp_path: Path) -> None:
    machine(tmp_path, 1000 * 1024, "0::/pod/app\n")
    for folder, limit, usage in (("pod", 500 * MIB, 100 * MIB), ("pod/app", 700 * MIB, 50 * MIB)):
        write(tmp_path / "sys/fs/cgroup" / folder / "memory.max", f"{limit}\n")
        write(tmp_path / "sys/fs/cgroup" / folder / "memory.current", f"{usage}\n")
    write(tmp_path / "sys/fs/cgroup/pod/memory.stat", f"anon 5\ninactive_file {30 * MIB}\n")
    assert available_bytes(tmp_path) == 430 * MIB


def test_a_namespaced_container_finds_its_limit_at_the_mount(tmp_path: Path) -> None:
    machine(tmp_path, 1000 * 1024, "0::/../../pod\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", f"{64 * MIB}\n")
    write(tmp_path / "sys/fs/cgroup/memory.current", "0\n")
    assert available_bytes(tmp_path) == 64 * MIB


def test_no_limit_and_version_one(tmp_path: Path) -> None:
    machine(tmp_path, 1000 * 1024, "4:memory:/box\n0::/x\n1:name=systemd:/x\n")
    write(tmp_path / "sys/fs/cgroup/x/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/x/memory.current", "7\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes", "7\n")
    write(tmp_path / "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{20 * MIB}\n")
    write(tmp_path / "sys/fs/cgroup/memory/box/memory.usage_in_bytes", f"{30 * MIB}\n")
    assert available_bytes(tmp_path) == 0


def test_a_system_without_proc_sets_no_limit(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 2**50


def test_this_machine_has_memory() -> None:
    assert 0 < available_bytes() < 2**50
