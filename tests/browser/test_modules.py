"""The parts of the page that need no browser, by node's own test runner."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
MODULES = Path(__file__).parent / "modules"


@pytest.mark.parametrize("path", sorted(MODULES.glob("*.test.mjs")), ids=lambda path: path.stem)
def test_module(path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    done = subprocess.run(
        [node, "--test", str(path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout
