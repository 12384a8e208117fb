"""One worker in the engine's own process: a single CPU or GPU rank."""

from __future__ import annotations

from streamserve.engine.executor.base import Progress
from streamserve.engine.step import StepDiff, StepResult
from streamserve.worker.spec import WorkerFacts, WorkerSpec


class InlineExecutor:
    """Calls the `Worker` directly; the step runs while the engine waits.

    Args:
        spec: what the worker serves and how.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        # Imported here so that only a process that runs a model pays for importing torch.
        from streamserve.worker.worker import Worker

        self._worker = Worker(spec)

    @staticmethod
    def device(name: str) -> str:
        """`cpu` or `cuda` from the configured device.

        Raises:
            ConfigError: the device is not there.
        """
        from streamserve.worker.device import resolve_device

        return str(resolve_device(name).type)

    def start(self, progress: Progress) -> WorkerFacts:
        """Loads the model and allocates the KV cache."""
        return self._worker.start(progress)

    def execute(self, diff: StepDiff) -> StepResult:
        """Runs one step to its end."""
        return self._worker.execute(diff)

    def close(self) -> None:
        """Gives the model and the cache back."""
        self._worker.close()
