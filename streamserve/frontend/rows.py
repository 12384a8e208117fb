"""The rows of all frontends, for whoever shows the whole server."""

from __future__ import annotations

from streamserve.frontend.metrics import PID_CELL, Layout


class Rows:
    """Reads them where they lie.

    Args:
        layout: of a row.
        memory: one row behind the other.
    """

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        self.layout = layout
        size = layout.row_bytes
        self._rows = [memory[at : at + size].cast("d") for at in range(0, len(memory), size)]
        self._widths = {family.name: family.width for family in layout.families}

    def each(self, name: str, labels: tuple[str, ...] = ()) -> list[list[float]]:
        """The cells of a series in each row."""
        at = self.layout.place(name, labels)
        end = at + self._widths[name]
        return [list(map(float, row[at:end])) for row in self._rows]

    def sums(self, name: str, labels: tuple[str, ...] = ()) -> list[float]:
        """The cells of a series, added up over the rows."""
        return [sum(column, 0.0) for column in zip(*self.each(name, labels), strict=True)]

    def pids(self) -> list[int]:
        """The process that writes each row; 0 where there is none yet."""
        return [int(row[PID_CELL]) for row in self._rows]
