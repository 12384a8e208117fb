"""The examples of docs/api.md do what they say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from server import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SHELL = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# There is no such stream when they run.
NOT_FOUND = "my-request"


def commands(block: str) -> list[str]:
    """The curl commands of a block; one may go over several lines."""
    return [f"curl {rest}" for rest in re.split(r"^curl ", block, flags=re.MULTILINE)[1:]]


@pytest.mark.parametrize("command", [command for block in SHELL for command in commands(block)])
def test_shell_examples(tiny_server, command):
    local = command.replace("http://127.0.0.1:8000", tiny_server.url)
    local = local.replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", local], capture_output=True, text=True, timeout=300, check=False)
    if NOT_FOUND in command:
        assert "stream_not_found" in done.stdout
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip()


@pytest.mark.parametrize("program", PYTHON)
def test_python_examples(tiny_server, program):
    for scheme in ("http", "ws"):
        there = tiny_server.url.replace("http", scheme)
        program = program.replace(f"{scheme}://127.0.0.1:8000", there)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
