"""StepMeter: how many tokens steps run, and what they cost the host."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

# Bounds of the histogram of tokens in a step.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepMeter:
    """Adds up over all steps; times are nanoseconds."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_tokens = 0
        self._num_by_size = [0] * (len(STEP_TOKENS) + 1)
        self._sums = (0, 0, 0)
        self._last = (0, 0, 0)

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

    def numbers(self) -> dict[str, int]:
        """What is in a STATS frame of it; see streamserve.messages."""
        numbers = {"steps": self._num_steps, "step_tokens": self._num_tokens}
        at_most = accumulate(self._num_by_size)
        numbers |= {
            f"step_tokens_le_{bound}": total for bound, total in zip(STEP_TOKENS, at_most, strict=False)
        }
        for prefix, times in (("", self._sums), ("last_", self._last)):
            for part, value in zip(("schedule", "execute", "settle"), times, strict=True):
                numbers[f"{prefix}{part}_ns"] = value
        return numbers
