"""Whether kernels in Triton can be launched here: it builds a piece of C against Python's headers first."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def launcher_obstacle() -> str | None:
    """What is missing, and what would help; None if nothing is.

    Triton would say so when the first kernel is launched, long after the start.
    """
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "finds no C compiler, which Triton builds its launcher with, apt-get install gcc or set CC"
    scheme = sysconfig.get_default_scheme()
    # As Triton reads it: Debian's scheme of that name has no headers.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    if not (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").exists():
        return "finds no Python.h, which Triton builds its launcher with, apt-get install python3-dev"
    return None


def can_launch() -> bool:
    """Whether Triton is installed and nothing is missing."""
    return importlib.util.find_spec("triton") is not None and launcher_obstacle() is None
