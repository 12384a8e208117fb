"""What a server's processes take, those that have ended included."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from loadtest.peers.process_tree import ProcessTree, parse_stat

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
# A child that works and ends, and one that waits in a session of its own.
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURN!r}])
block = bytearray(50_000_000)
sleeper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(sleeper.pid, flush=True)
sys.stdin.read()
sleeper.kill()
sleeper.wait()
"""


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_a_stat_line_is_read_whatever_the_name() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    rest = " ".join(str(number) for number in [0] * 7)
    process = parse_stat(
        f"12 (a) b (c) S 3 4 5 {rest} {ticks} {2 * ticks} {3 * ticks} {4 * ticks} 20 0 1 0 77 9"
    )
    assert (process.pid, process.parent, process.session, process.started) == (12, 3, 5, 77)
    assert not process.is_zombie
    assert process.cpu_s == 10.0


def test_the_tree_has_all_processes_and_what_they_took() -> None:
    with running(PARENT) as process:
        assert process.stdout is not None
        sleeper = int(process.stdout.readline())
        tree = ProcessTree(process.pid)
        assert {member.pid for member in tree.members()} == {process.pid, sleeper}
        assert tree.cpu_s() >= 0.3
        assert 50_000_000 < tree.pss_bytes() < 500_000_000
        assert tree.peak_rss_bytes() > 50_000_000


def test_a_tree_that_has_ended_is_empty() -> None:
    with running("pass") as process:
        process.wait()
    tree = ProcessTree(process.pid)
    assert (tree.members(), tree.cpu_s(), tree.pss_bytes()) == ([], 0, 0)
