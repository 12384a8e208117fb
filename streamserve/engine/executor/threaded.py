"""One worker in a thread of its own, so that the engine goes on while a step runs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from streamserve.engine.executor.base import PendingStep, Progress
from streamserve.engine.executor.inline import InlineExecutor
from streamserve.engine.step import StepDiff, StepResult
from streamserve.worker.spec import WorkerFacts, WorkerSpec


class ThreadedExecutor:
    """Runs the steps of an `InlineExecutor` in the order of submission, in one thread.

    The thread gives the interpreter away inside the kernels, and that is when the engine gets its turn.

    Args:
        spec: what the worker serves and how.
    """

    depth = 2

    def __init__(self, spec: WorkerSpec) -> None:
        # The worker is made there too: how many threads its kernels use is a setting of the thread they are
        # called from.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._inline = self._thread.submit(InlineExecutor, spec).result()

    def start(self, progress: Progress) -> WorkerFacts:
        """Loads the model and allocates the KV cache."""
        return self._thread.submit(self._inline.start, progress).result()

    def submit(self, diff: StepDiff) -> PendingStep:
        """Has the step run behind the others."""
        return self._thread.submit(self._run, diff)

    def work_ahead(self) -> bool:
        """See `StepRunner.work_ahead`."""
        return self._thread.submit(self._inline.work_ahead).result()

    def statistics(self) -> Mapping[str, int]:
        """See `StepRunner.statistics`; a step that runs meanwhile may be counted in part."""
        return self._inline.statistics()

    def close(self) -> None:
        """Gives the model and the cache back, after what was submitted has run."""
        self._thread.submit(self._inline.close).result()
        self._thread.shutdown()

    def _run(self, diff: StepDiff) -> StepResult:
        return self._inline.submit(diff).result()
