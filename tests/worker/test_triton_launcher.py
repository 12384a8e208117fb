"""What Triton needs beside itself to launch a kernel."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from streamserve.worker import triton_launcher


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of headers with Python.h in it, and a C compiler somewhere."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton_launcher.shutil, "which", lambda name: "/bin/cc" if name == "gcc" else None)
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(
        sysconfig,
        "get_paths",
        lambda scheme: {"include": str(tmp_path if scheme == "posix_prefix" else tmp_path / "none")},
    )
    return tmp_path


def test_with_a_compiler_and_headers_nothing_is_missing(machine: Path) -> None:
    assert triton_launcher.launcher_obstacle() is None


def test_without_a_compiler(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launcher.shutil, "which", lambda name: None)
    assert "no C compiler" in (triton_launcher.launcher_obstacle() or "")
    assert not triton_launcher.can_launch()
    monkeypatch.setenv("CC", "/opt/cc")
    assert triton_launcher.launcher_obstacle() is None


def test_without_headers(machine: Path) -> None:
    (machine / "Python.h").unlink()
    assert "python3-dev" in (triton_launcher.launcher_obstacle() or "")
