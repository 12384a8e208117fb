from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHILD = """
import ctypes, sys, time
from streamserve.lifeline import watch_lifeline
watch_lifeline(int(sys.argv[1]))
print("watching", flush=True)
{}
"""


@pytest.mark.parametrize("busy", ["time.sleep(1000)", "ctypes.CDLL(None).pause()", "while True: pass"])
def test_the_process_ends_when_the_other_end_closes(busy: str) -> None:
    read_end, write_end = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(busy), str(read_end)],
        stdout=subprocess.PIPE,
        pass_fds=[read_end],
        cwd=ROOT,
    )
    os.close(read_end)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"watching\n"
        assert child.poll() is None
        os.close(write_end)
        pidfd = os.pidfd_open(child.pid)
        ended = select.select([pidfd], [], [], 30)[0]
        os.close(pidfd)
        if not ended:
            child.kill()
        assert child.wait() == 1
