"""How a step's budget is shared, so that no long prompt holds up those who come after it.

Every running request has one token of the budget. Of the rest, a request that has more than one token to run
(it reads a prompt, or computes again what it lost) may take all, as long as it is the only one and nobody who
could come in waits. Otherwise:

    the longest running of them   at most half of the rest
    the others, and one seat      even shares of what it leaves, none of them more than that half
    who comes in                  in order: at most half of what is left to come in with if another could
                                  come in behind, and at most half of the budget if others are being read

The seat is there only if somebody waits who could come in. So long prompts still end about in the order in
which they came, at half speed or better, and a short one behind them begins in the next step or two.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamserve.engine.scheduler.table import Counts


def share_budget(wanted: Counts, budget: int, *, keeps_seat: bool) -> Counts:
    """How many tokens each running request runs: one at least, all together at most `budget`.

    Args:
        wanted: int64[n], tokens that each has to run, at least one; longest running first; n <= `budget`.
        budget: tokens of the step.
        keeps_seat: somebody waits who could come in. If the budget has more than n tokens, one at least is
            left over for that.
    """
    rest = budget - len(wanted)
    (reading,) = (wanted > 1).nonzero()
    num_others = len(reading) - 1 + keeps_seat
    if num_others <= 0:
        return np.minimum(wanted, 1 + rest)
    half = rest // 2
    first = min(int(wanted[reading[0]]) - 1, half)
    most = np.ones_like(wanted)
    most[reading] += min((rest - first) // num_others, half)
    most[reading[0]] = 1 + first
    return np.minimum(wanted, most)


def pace_documents(counts: Counts, documents: npt.NDArray[np.bool_], most: int) -> Counts:
    """Cuts what documents run to `most` tokens together, the longest running first; some may get none.

    Nothing is cut when only documents run.

    Args:
        counts: int64[n], tokens that each running request would run.
        documents: bool[n], which of them read a document.
        most: see `streamserve.engine.pacing`.
    """
    (rows,) = documents.nonzero()
    if len(rows) in (0, len(counts)):
        return counts
    wanted = counts[rows]
    before = wanted.cumsum() - wanted
    paced = counts.copy()
    paced[rows] = np.clip(most - before, 0, wanted)
    return paced


def newcomer_share(left: int, budget: int, *, is_followed: bool, is_shared: bool) -> int:
    """Most tokens for a request that comes in; at least one.

    Args:
        left: tokens of the step that nobody has yet, at least one.
        budget: all tokens of the step.
        is_followed: another request waits that could come in behind it.
        is_shared: another request runs more than one token in this step.
    """
    most = _half(left) if is_followed else left
    return min(most, _half(budget)) if is_shared else most


def _half(count: int) -> int:
    return -(-count // 2)
