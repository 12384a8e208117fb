"""Flight: a step that has been decided and not been settled yet."""

from __future__ import annotations

from dataclasses import dataclass

from streamserve.engine.scheduler.table import Counts, Slots


@dataclass(frozen=True, slots=True)
class Flight:
    """What `Scheduler.settle` must know of a step, as things stood when it was decided.

    Attributes:
        step: its number.
        slots: intp[n], who runs.
        before, after: int64[n], computed tokens of each of them before the step and after it.
        sampling: intp[k], those of `slots` that reach the end of their known tokens.
        positions: int64[k], where the token stands that each of those samples.
        is_repeat: it is the same as the step before.
        repeats: how many more steps may be the same again if nobody joins or leaves: every running request
            runs one token and samples one, until the first of them has its last.
        version: of the table, when the step was decided.
    """

    step: int
    slots: Slots
    before: Counts
    after: Counts
    sampling: Slots
    positions: Counts
    is_repeat: bool
    repeats: int
    version: int

    def again(self) -> Flight:
        """The same step once more. Hot."""
        return Flight(
            step=self.step + 1,
            slots=self.slots,
            before=self.after,
            after=self.after + 1,
            sampling=self.sampling,
            positions=self.positions + 1,
            is_repeat=True,
            repeats=self.repeats - 1,
            version=self.version,
        )
