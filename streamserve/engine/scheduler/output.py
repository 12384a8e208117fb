"""What the scheduler reports."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens of one step, a row for each request that sampled one and still runs.

    A prefill chunk that does not reach the end of the known tokens has no row. The token that stopped a
    request is in its last row; whether to show it is the frontend's business.

    Attributes:
        frontends: int32[n], whose request it is.
        streams: uint64[n], the frontend's name for it.
        token_ids: int32[n].
        finish: uint8[n], a `messages.Finish` code.
        cached: uint32[n], prompt tokens found in the prefix cache, for rows with the first token of a
            request; 0 for the others. None when no row is a first token.
    """

    frontends: npt.NDArray[np.int32]
    streams: npt.NDArray[np.uint64]
    token_ids: npt.NDArray[np.int32]
    finish: npt.NDArray[np.uint8]
    cached: npt.NDArray[np.uint32] | None


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Gauges and counters.

    Attributes:
        running: requests that hold a slot.
        waiting: requests that wait for one, preempted ones among them.
        num_blocks: blocks in the KV cache.
        free_blocks: those that no request holds, whether or not their content can still be found.
        prefix_queries: prompt tokens looked up in the prefix cache since the start.
        prefix_hits: prompt tokens found there.
        preemptions: requests that had to give their slot back so far.
    """

    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
