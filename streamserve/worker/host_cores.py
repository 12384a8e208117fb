"""How many processor cores this process may really use. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from streamserve.control_groups import group_folders


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that the process may run on, and whose time its control groups grant it; at least 1.

    A quota is rounded down. Threads beyond it would be stopped in the middle of a product, and all others
    wait for them until the next period begins, a tenth of a second later.

    Args:
        root: where `proc` and `sys` are found.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for folder in group_folders(root, "cpu") if (quota := _quota(folder)) is not None]
    return max(1, int(min([cores, *quotas])))


def _quota(folder: Path) -> float | None:
    """Cores' worth of time that one control group grants, or None where it sets no limit."""
    for read in (_version_two, _version_one):
        try:
            quota, period = read(folder)
        except (OSError, ValueError):
            continue
        return quota / period if quota > 0 and period > 0 else None
    return None


def _version_two(folder: Path) -> tuple[int, int]:
    quota, period = (folder / "cpu.max").read_text().split()
    return (0 if quota == "max" else int(quota)), int(period)


def _version_one(folder: Path) -> tuple[int, int]:
    # -1 is no limit.
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return quota, int((folder / "cpu.cfs_period_us").read_text())
