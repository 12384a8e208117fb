"""What a section of the check found, as it is written to disk while it finds it. Torch-free."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.gpu_check.targets import Bound

RUNNING, PASSED, FAILED, SKIPPED = "running", "passed", "failed", "skipped"

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is right or wrong.

    Attributes:
        name: what was looked at.
        passed: None for a target that was not judged.
        detail: the numbers behind it.
    """

    name: str
    passed: bool | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Figures.

    Attributes:
        title: what they are.
        columns: names, units in them.
        rows: a cell for each column.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)


@dataclass(slots=True)
class SectionResult:
    """All of a section.

    Attributes:
        name: of the section.
        state: `running`, `passed`, `failed` or `skipped`; a section that is still running when its process
            has ended has failed.
        seconds: how long it took.
        checks, tables: in their order.
        notes: lines to go with them.
        problem: why it ended early; empty if it did not.
    """

    name: str
    state: str = RUNNING
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SectionResult:
        """What `to_json` was made from."""
        checks = [Check(**check) for check in data["checks"]]
        tables = [Table(**table) for table in data["tables"]]
        return cls(**{**data, "checks": checks, "tables": tables})


class Record:
    """Takes down what a section finds; every line is on disk before the next one is looked for.

    Args:
        name: of the section.
        folder: where its file goes.
        judges: whether figures are held against their targets: not where there is no GPU.
    """

    def __init__(self, name: str, folder: Path, *, judges: bool) -> None:
        self.result = SectionResult(name)
        self._path = section_path(folder, name)
        self._judges = judges
        self._began = time.monotonic()
        self._save()

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Something that must hold on any device."""
        self._add(Check(name, bool(passed), detail))

    def target(self, bound: Bound, value: float) -> None:
        """A figure that has a target, which counts on a GPU alone."""
        self._add(Check(bound.name, bound.holds(value) if self._judges else None, bound.words(value)))

    def table(self, title: str, *columns: str) -> Table:
        """A new table; call `row` to fill it."""
        table = Table(title, columns)
        self.result.tables.append(table)
        return table

    def row(self, table: Table, *cells: Cell) -> None:
        """One more row of `table`."""
        table.rows.append(cells)
        self._save()

    def note(self, line: str) -> None:
        """Something to know."""
        self.result.notes.append(line)
        self._save()

    def skip(self, why: str) -> None:
        """Nothing can be said here; not a failure."""
        self.result.state, self.result.problem = SKIPPED, why
        self._save()

    def end(self, problem: str = "") -> None:
        """The section is over.

        Args:
            problem: why it could not go on; empty if it came to its end.
        """
        result = self.result
        result.problem = problem or result.problem
        if problem or any(check.passed is False for check in result.checks):
            result.state = FAILED
        elif result.state == RUNNING:
            result.state = PASSED
        self._save()

    def _add(self, check: Check) -> None:
        self.result.checks.append(check)
        self._save()

    def _save(self) -> None:
        self.result.seconds = round(time.monotonic() - self._began, 2)
        write_json(self._path, self.result.to_json())


def section_path(folder: Path, name: str) -> Path:
    """The file of a section."""
    return folder / "sections" / f"{name}.json"


def read_section(folder: Path, name: str) -> SectionResult | None:
    """What is known of a section so far; None before it has begun."""
    try:
        return SectionResult.from_json(json.loads(section_path(folder, name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def write_json(path: Path, data: Any) -> None:
    """At once or not at all: whoever reads meanwhile finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
