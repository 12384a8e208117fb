"""The engine, but for one prompt that it dies of at every step in which that is read."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from streamserve.engine import process
from streamserve.engine.executor.base import Executor
from streamserve.engine.step import StepDiff


class MortalExecutor:
    """An executor that kills its process instead of running some steps."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, diff: StepDiff) -> Any:
        deadly = [int(part) for part in os.environ["DEADLY_PROMPT"].split(",")]
        if any(join.tokens[: join.num_prompt].tolist() == deadly for join in diff.joins):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._inner.submit(diff)


def choose_executor(*arguments: Any) -> Executor:
    executor: Executor = MortalExecutor(_choose(*arguments))
    return executor


_choose, process.choose_executor = process.choose_executor, choose_executor

if __name__ == "__main__":
    sys.exit(process.main())
