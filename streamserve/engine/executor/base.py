"""The seam between the engine and whatever runs the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from streamserve.engine.step import StepDiff, StepResult
from streamserve.worker.spec import WorkerFacts

Progress = Callable[[str, float], None]


class Executor(Protocol):
    """Runs steps on one worker or many, all of which get the same `StepDiff`."""

    def start(self, progress: Progress) -> WorkerFacts:
        """Loads the model and allocates the KV cache.

        Raises:
            ConfigError: the model cannot be served as configured.
        """

    def execute(self, diff: StepDiff) -> StepResult:
        """Runs one step to its end."""

    def close(self) -> None:
        """Gives everything back."""
