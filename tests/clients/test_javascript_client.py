"""clients/javascript by node's own test runner, against real servers, and its types by tsc."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from server import ROOT, running_server, wait_idle

pytestmark = pytest.mark.clients
FOLDER = ROOT / "clients" / "javascript"


@pytest.fixture(scope="module")
def keyed_server(tiny_model):
    with running_server(
        str(tiny_model), "--dtype=float32", env={"OMP_NUM_THREADS": "2", "STREAMSERVE_API_KEY": "sesame"}
    ) as server:
        yield server


def test_its_own_tests(packages, tiny_server, keyed_server):
    servers = {
        "STREAMSERVE_URL": tiny_server.url,
        "STREAMSERVE_KEYED_URL": keyed_server.url,
        "STREAMSERVE_KEY": "sesame",
    }
    # Node has WebSockets of its own since version 22; before, on demand.
    tests = sorted(FOLDER.glob("test/*.test.js"))
    command = ["node", "--experimental-websocket", "--test", "--test-reporter=tap", *tests]
    done = subprocess.run(
        command,
        cwd=FOLDER,
        env={**os.environ, **servers},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(re.findall(r"^# (pass|fail|skipped) (\d+)$", done.stdout, re.MULTILINE))
    assert int(counts["pass"]) > 100
    assert (counts["fail"], counts["skipped"]) == ("0", "0")
    wait_idle(tiny_server)


def test_its_types(packages):
    command = [packages / "node_modules" / ".bin" / "tsc", "--project", FOLDER]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
