"""The seam between the engine and whatever runs the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from streamserve.engine.step import StepDiff, StepResult
from streamserve.worker.spec import WorkerFacts

Progress = Callable[[str, float], None]


class PendingStep(Protocol):
    """A step on its way through the workers."""

    def result(self) -> StepResult:
        """What came of the step, once it has run; to be asked for once, in the order of submission."""


class StepRunner(Protocol):
    """Runs steps.

    Attributes:
        depth: how many steps may be submitted before the result of the first is asked for; with more than
            one, the engine decides the next step and sends the last one's tokens while workers run.
    """

    depth: int

    def submit(self, diff: StepDiff) -> PendingStep:
        """Has a step run after all those submitted before it."""

    def work_ahead(self) -> bool:
        """Does a piece of what makes later steps faster, which takes less than a second.

        Called again and again while there is nothing to run and nothing in flight, until it is False: there
        was nothing left to do.
        """

    def statistics(self) -> Mapping[str, int]:
        """The workers' part of a STATS frame (streamserve.messages); may be asked for at any time."""


class Executor(StepRunner, Protocol):
    """Runs steps on one worker or many, all of which get the same `StepDiff`."""

    def start(self, progress: Progress) -> WorkerFacts:
        """Loads the model and allocates the KV cache.

        Raises:
            ConfigError: the model cannot be served as configured.
        """

    def close(self) -> None:
        """Gives everything back, after what was submitted has run."""
