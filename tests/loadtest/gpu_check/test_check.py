"""The GPU check runs its sections whatever becomes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.gpu_check.__main__ import Check, environment
from loadtest.gpu_check.plan import Section
from loadtest.gpu_check.results import SectionResult

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu_check.sh"

# In the place of loadtest.gpu_check.child: sections that do what their names say.
CHILD = """
import os, sys, time
from pathlib import Path
from loadtest.gpu_check.results import Record
out = Path(sys.argv[sys.argv.index("--out") + 1])
for name in sys.argv[sys.argv.index("--out") + 2 :]:
    record = Record(name, out, judges=True)
    if name == "dies":
        os._exit(3)
    if name == "hangs":
        time.sleep(600)
    record.check("right", name != "wrong")
    record.end()
"""


class ScriptedCheck(Check):
    """Runs CHILD."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", CHILD]


def states(results: list[SectionResult]) -> dict[str, str]:
    return {result.name: result.state for result in results}


def test_sections_behind_one_that_ends_its_process_run_in_another(tmp_path: Path) -> None:
    check = ScriptedCheck(tmp_path, is_rehearsal=False, total_s=100)
    names = ("good", "wrong", "dies", "fine", "hangs", "last")
    results = check.run_group([Section(name, 60 if name != "hangs" else 1) for name in names])
    assert states(results) == {
        "good": "passed",
        "wrong": "failed",
        "dies": "failed",
        "fine": "passed",
        "hangs": "failed",
        "last": "passed",
    }
    problems = {result.name: result.problem for result in results}
    assert problems["dies"] == "its process ended with 3; see logs"
    assert problems["hangs"] == "not done in 1 s"
    written = json.loads((tmp_path / "results.json").read_text())
    assert [section["name"] for section in written["sections"]] == list(names)
    assert not written["passed"]


def test_when_the_time_is_up_nothing_more_is_waited_for(tmp_path: Path) -> None:
    check = ScriptedCheck(tmp_path, is_rehearsal=False, total_s=0)
    results = check.run_group([Section("hangs", 60), Section("hangs too", 60)])
    assert set(states(results).values()) == {"failed"}


def test_kernels_are_interpreted_in_a_rehearsal_alone(tmp_path: Path) -> None:
    rehearsed = environment({}, tmp_path, is_rehearsal=True)
    assert rehearsed["TRITON_INTERPRET"] == "1"
    assert rehearsed["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert "TRITON_INTERPRET" not in environment({"TRITON_INTERPRET": "1"}, tmp_path, is_rehearsal=False)


@pytest.mark.heavy
@pytest.mark.torch
def test_the_rehearsal_passes(tmp_path: Path) -> None:
    """All sections on a CPU, through the script."""
    variables = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path), "WHEELS": str(tmp_path / "no")}
    run = subprocess.run(
        [SCRIPT, "--rehearse"], env=variables, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["passed"]
    assert {section["state"] for section in results["sections"]} <= {"passed", "skipped"}
    assert "### server" in (tmp_path / "results.md").read_text()
