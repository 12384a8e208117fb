"""The control groups that this process lives in, which is what limits a container."""

from __future__ import annotations

from pathlib import Path


def group_folders(root: Path, controller: str) -> list[Path]:
    """The process's groups of one controller with all their parents: each of them may hold a limit.

    Folders of groups that lie outside a container's own view are not there; whoever reads must expect that.

    Args:
        root: where `proc` and `sys` are found.
        controller: such as `memory` or `cpu`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        folders += [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders
