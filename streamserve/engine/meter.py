"""StepMeter: how many tokens steps run, what they cost the host, and how long requests waited for one."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

# Bounds of the histogram of tokens in a step.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Bounds of the histogram of times in the queue.
QUEUE_MS = (
    300, 500, 800, 1000, 1500, 2000, 2500, 5000, 10_000, 15_000, 20_000, 30_000, 40_000, 50_000, 60_000,
    120_000, 240_000, 480_000, 960_000, 1_920_000, 7_680_000,
)  # fmt: skip
_NS_PER_MS = 1_000_000


class StepMeter:
    """Adds up over all steps; times are nanoseconds."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_tokens = 0
        self._num_by_size = [0] * (len(STEP_TOKENS) + 1)
        self._sums = (0, 0, 0)
        self._last = (0, 0, 0)
        self._queue_ns = 0
        self._num_by_wait = [0] * (len(QUEUE_MS) + 1)

    def record(self, num_tokens: int, schedule_ns: int, execute_ns: int, settle_ns: int) -> None:
        """One step. Hot: once a step.

        Args:
            num_tokens: that ran in it.
            schedule_ns: taking in messages, and deciding what runs.
            execute_ns: the worker.
            settle_ns: taking in its tokens, and sending them.
        """
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._num_by_size[bisect_left(STEP_TOKENS, num_tokens)] += 1
        schedule_sum, execute_sum, settle_sum = self._sums
        self._sums = (schedule_sum + schedule_ns, execute_sum + execute_ns, settle_sum + settle_ns)
        self._last = (schedule_ns, execute_ns, settle_ns)

    def record_begin(self, waited_ns: int) -> None:
        """A request has begun to run, so long after its arrival."""
        waited_ns = max(0, waited_ns)
        self._queue_ns += waited_ns
        self._num_by_wait[bisect_left(QUEUE_MS, waited_ns / _NS_PER_MS)] += 1

    def numbers(self) -> dict[str, int]:
        """What is in a STATS frame of it; see streamserve.messages."""
        numbers = {"steps": self._num_steps, "step_tokens": self._num_tokens}
        numbers |= _at_most("step_tokens_le_", STEP_TOKENS, self._num_by_size)
        numbers |= {"begun": sum(self._num_by_wait), "queue_ns": self._queue_ns}
        numbers |= _at_most("queue_ms_le_", QUEUE_MS, self._num_by_wait)
        for prefix, times in (("", self._sums), ("last_", self._last)):
            for part, value in zip(("schedule", "execute", "settle"), times, strict=True):
                numbers[f"{prefix}{part}_ns"] = value
        return numbers


def _at_most(prefix: str, bounds: tuple[int, ...], counts: list[int]) -> dict[str, int]:
    """How many were at most each bound, from how many were between each and the one before."""
    totals = accumulate(counts)
    return {f"{prefix}{bound}": total for bound, total in zip(bounds, totals, strict=False)}
