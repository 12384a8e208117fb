"""`python -m loadtest.gpu_check`: all sections, each guarded, in a fixed time; see docs/performance.md."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from loadtest.gpu_check import report
from loadtest.gpu_check.plan import TOTAL_S, Section, allowance, chosen_groups, without_finished
from loadtest.gpu_check.results import (
    FAILED,
    RUNNING,
    SectionResult,
    read_section,
    section_path,
    write_json,
)

_POLL_S = 0.1
# A rehearsal has two shared processors and an interpreter where the real thing has a GPU.
_REHEARSAL_FACTOR = 4.0


class Check:
    """Runs groups of sections in processes of their own, and writes down what is known after each of them.

    Attributes:
        results: of all sections so far.

    Args:
        folder: for results.
        is_rehearsal: on a CPU.
        total_s: for all of it.
    """

    def __init__(self, folder: Path, *, is_rehearsal: bool, total_s: float) -> None:
        self._folder, self._is_rehearsal = folder, is_rehearsal
        self._factor = _REHEARSAL_FACTOR if is_rehearsal else 1.0
        self._total_s = total_s * self._factor
        self._began = time.monotonic()
        self.results: list[SectionResult] = []

    def command(self) -> list[str]:
        """What runs sections, but for its arguments."""
        return [sys.executable, "-m", "loadtest.gpu_check.child"]

    def run_group(self, group: Sequence[Section]) -> list[SectionResult]:
        """Runs sections; those behind one that took its process with it run in another one."""
        results: dict[str, SectionResult] = {}
        left = tuple(group)
        while left:
            for result in self._run_process(left):
                results[result.name] = result
                self.results.append(result)
                write_results(self._folder, self.results, is_rehearsal=self._is_rehearsal)
                print(_summary(result), flush=True)
            left = without_finished(group, results)
        return list(results.values())

    def _run_process(self, sections: Sequence[Section]) -> Iterator[SectionResult]:
        """The results of a process's sections as they end; it yields at least one."""
        for section in sections:
            section_path(self._folder, section.name).unlink(missing_ok=True)
        command = [*self.command(), *(["--rehearse"] if self._is_rehearsal else [])]
        command += ["--out", str(self._folder), *(section.name for section in sections)]
        log_path = self._folder / "logs" / f"{sections[0].name}.txt"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(os.environ, self._folder, is_rehearsal=self._is_rehearsal),
                start_new_session=True,
            )
        try:
            for section in sections:
                result = self._await(section, process)
                yield result
                if process.poll() is not None and result.state == FAILED:
                    return
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _await(self, section: Section, process: subprocess.Popen[bytes]) -> SectionResult:
        """Waits for a section to end, and ends the process if it takes too long."""
        began = time.monotonic()
        allowed = allowance(section, began - self._began, self._total_s, self._factor)
        problem = ""
        while True:
            has_ended = process.poll() is not None
            result = read_section(self._folder, section.name)
            if result is not None and result.state != RUNNING:
                return result
            if has_ended:
                problem = f"its process ended with {process.returncode}; see logs"
            elif time.monotonic() - began > allowed:
                problem = f"not done in {allowed:.0f} s"
            if problem:
                break
            time.sleep(_POLL_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        result = read_section(self._folder, section.name) or SectionResult(section.name)
        result.state, result.problem = FAILED, problem
        result.seconds = round(time.monotonic() - began, 2)
        write_json(section_path(self._folder, section.name), result.to_json())
        return result


def environment(before: Mapping[str, str], folder: Path, *, is_rehearsal: bool) -> dict[str, str]:
    """Variables of a process that runs sections."""
    after = {**before, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    # The usual place is in a home that a container may not have.
    after.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    if is_rehearsal:
        after["TRITON_INTERPRET"] = "1"
    else:
        after.pop("TRITON_INTERPRET", None)
    return after


def write_results(folder: Path, results: Sequence[SectionResult], *, is_rehearsal: bool) -> None:
    """results.json and results.md."""
    write_json(folder / "results.json", report.to_json(results, is_rehearsal=is_rehearsal))
    text = report.to_markdown(results, is_rehearsal=is_rehearsal)
    (folder / "results.md").write_text(text, encoding="utf-8")


def _summary(result: SectionResult) -> str:
    lines = [f"{result.state:8} {result.name} ({result.seconds:.1f} s)"]
    lines += [f"           {report.check_line(check)}" for check in result.checks]
    if result.problem:
        lines.append(f"           {result.problem.strip().splitlines()[-1]}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Runs the check; 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check_out"), help="folder of results.json and results.md"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU; figures mean nothing")
    parser.add_argument("--only", default="", metavar="SECTION,…", help="these sections and no others")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all sections together")
    options = parser.parse_args(arguments)
    try:
        groups = chosen_groups(name for name in options.only.split(",") if name)
    except ValueError as error:
        parser.error(str(error))
    folder: Path = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    check = Check(folder, is_rehearsal=options.rehearse, total_s=options.seconds)
    for group in groups:
        check.run_group(group)
    print(f"results in {folder}")
    return 0 if report.passed(check.results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
