"""One worker in the engine's own process: a single CPU or GPU rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamserve.engine.executor.base import PendingStep, Progress
from streamserve.engine.step import StepDiff, StepResult
from streamserve.worker.spec import WorkerFacts, WorkerSpec

if TYPE_CHECKING:
    from streamserve.worker.worker import Worker


class _Deferred:
    """A step that runs when its result is asked for."""

    __slots__ = ("_diff", "_worker")

    def __init__(self, worker: Worker, diff: StepDiff) -> None:
        self._worker = worker
        self._diff = diff

    def result(self) -> StepResult:
        return self._worker.execute(self._diff)


class InlineExecutor:
    """Calls the `Worker` directly; the step runs while the engine waits.

    Args:
        spec: what the worker serves and how.
    """

    depth = 1

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

    def submit(self, diff: StepDiff) -> PendingStep:
        """Has the step run when its result is asked for."""
        return _Deferred(self._worker, diff)

    def work_ahead(self) -> bool:
        """See `StepRunner.work_ahead`."""
        return self._worker.work_ahead()

    def statistics(self) -> Mapping[str, int]:
        """See `StepRunner.statistics`."""
        return self._worker.statistics()

    def close(self) -> None:
        """Gives the model and the cache back."""
        self._worker.close()
