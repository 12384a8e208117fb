"""results.json and results.md, the latter fit to be pasted into docs/performance.md. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.gpu_check.results import Cell, Check, SectionResult, Table

_VERDICTS = {True: "PASS", False: "FAIL", None: "not judged"}


def to_json(results: Sequence[SectionResult], *, is_rehearsal: bool) -> dict[str, Any]:
    """All that is known, for machines."""
    return {
        "rehearsal": is_rehearsal,
        "passed": passed(results),
        "sections": [result.to_json() for result in results],
    }


def passed(results: Sequence[SectionResult]) -> bool:
    """Whether every section came to its end and nothing in it failed."""
    return bool(results) and all(result.state in ("passed", "skipped") for result in results)


def to_markdown(results: Sequence[SectionResult], *, is_rehearsal: bool) -> str:
    """All that is known, for people."""
    lines = ["## On a GPU: `scripts/gpu_check.sh`", ""]
    if is_rehearsal:
        lines += ["**A rehearsal on a CPU: the figures below mean nothing.**", ""]
    overview = Table("", ("section", "state", "seconds"))
    overview.rows.extend((result.name, result.state, result.seconds) for result in results)
    lines += table_lines(overview)
    for result in results:
        lines += ["", f"### {result.name}", *_section_lines(result)]
    return "\n".join(lines) + "\n"


def table_lines(table: Table) -> list[str]:
    """A Markdown table, without its title."""
    lines = [_row(table.columns), _row(["---"] * len(table.columns))]
    return lines + [_row(row) for row in table.rows]


def check_line(check: Check) -> str:
    """One line, for Markdown and for a terminal."""
    detail = f": {check.detail}" if check.detail else ""
    return f"{_VERDICTS[check.passed]} {check.name}{detail}"


def _section_lines(result: SectionResult) -> list[str]:
    lines: list[str] = []
    if result.problem:
        # The last line says what went wrong; the whole of it is in results.json.
        lines += ["", f"{result.state}: `{result.problem.strip().splitlines()[-1]}`"]
    for table in result.tables:
        lines += ["", table.title, "", *table_lines(table)]
    if result.checks:
        lines += ["", *(f"- {check_line(check)}" for check in result.checks)]
    if result.notes:
        lines += ["", *(f"- {note}" for note in result.notes)]
    return lines


def _row(cells: Sequence[Cell]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(cell: Cell) -> str:
    text = f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return text.replace("|", "\\|")
