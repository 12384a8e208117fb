"""Packages of node that the tests run with."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "node"


@pytest.fixture(scope="session")
def packages():
    """A folder with the programs and the packages that they import; kept from one run to the next."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    manifest = (HERE / "package.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "streamserve" / "test-clients"
    folder = cache / hashlib.sha256(manifest).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_bytes(manifest)
    if not (folder / "node_modules" / ".package-lock.json").exists():
        command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        installed = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
        )
        if installed.returncode:
            pytest.skip(f"npm cannot install: {installed.stderr.strip().splitlines()[-1:]}")
    return folder
