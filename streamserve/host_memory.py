"""How much memory this process may still take, by /proc and the control groups it lives in."""

from __future__ import annotations

from pathlib import Path

from streamserve.control_groups import group_folders

# A control group without a limit reads as a number near 2**63 (version 1) or as "max" (version 2).
_NO_LIMIT = 1 << 60


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping or running into a control group's limit.

    Args:
        root: where `proc` and `sys` are found.
    """
    candidates = [_machine_available(root)]
    candidates += [
        room for folder in group_folders(root, "memory") if (room := _cgroup_room(folder)) is not None
    ]
    return max(0, min(candidates))


def _machine_available(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return _NO_LIMIT
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT


def _cgroup_room(folder: Path) -> int | None:
    """Bytes left in one control group, or None where it sets no limit."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit_text = (folder / limit_name).read_text().strip()
            usage = int((folder / usage_name).read_text())
        except OSError:
            continue
        if limit_text == "max" or int(limit_text) >= _NO_LIMIT:
            return None
        return int(limit_text) - usage + _reclaimable(folder)
    return None


def _reclaimable(folder: Path) -> int:
    """Page cache that the kernel gives back before it kills anyone: usage counts it, but it is free."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, value = line.split()
        if name == "inactive_file":
            return int(value)
    return 0
