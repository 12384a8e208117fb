"""How often in a row a process that died is started again, and how soon."""

from __future__ import annotations

from dataclasses import dataclass

from streamserve.supervisor.children import ChildFailed

# To one that has served this long, the deaths before it are not counted.
FORGIVEN_AFTER_S = 300.0
# The first restart in a row is at once, the second after this; each further one waits twice as long.
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0


@dataclass(slots=True)
class Restarts:
    """Those of one process.

    Attributes:
        most: how many there may be in a row.
        option: what the operator sets that with.
        num: how many there were in this row.
    """

    most: int
    option: str
    num: int = 0

    def forgive(self, served_s: float) -> None:
        """Begins a new row if the process that has died served long enough."""
        if served_s >= FORGIVEN_AFTER_S:
            self.num = 0

    def next_delay_s(self, name: str, how: str) -> float:
        """Counts one more, and says after how many seconds it is due.

        Args:
            name: what the operator calls the process.
            how: it ended, as the end of a sentence that begins with its name.

        Raises:
            ChildFailed: there were too many.
        """
        if self.num >= self.most:
            often = f", after {self.num} restarts in a row" if self.num else ""
            raise ChildFailed(f"the {name} {how}{often} ({self.option})")
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (self.num - 1)) if self.num else 0.0
        self.num += 1
        return delay_s
