"""How a step's budget is shared, so that no long prompt holds up those who come after it.

A request that decodes has one token of the budget. The rest is for those that have more than one token to run
(they read a prompt, or compute again what they lost). One of them may take it all, as long as it is the only
one and nobody who could come in waits. Otherwise:

    the longest running of them   at most half of the rest
    one seat                      an even share of what that leaves, but no less than `LEAST_PIECE`
    the others                    even shares of what is left then, but no less than `LEAST_PIECE` each and no
                                  more than that half; those with the least to run first, until it is all gone
    who comes in                  in order: at most half of what is left to come in with if another could
                                  come in behind, and at most half of the budget if others are being read

The seat is there only if somebody waits who could come in. So long prompts still end about in the order in
which they came, at half speed or better, and a short one behind them begins in the next step or two, however
many they are. Where many prompts are read at a time, most of them get nothing in a step: to look at all that
a request has so far for a few tokens more costs the step nearly as much as to look at it for many.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamserve.engine.scheduler.table import Counts

# Tokens of a prompt that are worth a call of attention of their own.
LEAST_PIECE = 64


def share_budget(wanted: Counts, budget: int, *, keeps_seat: bool) -> Counts:
    """How many tokens each running request runs, all together at most `budget`.

    At least one for each that wants just one, and for the longest running of the others.

    Args:
        wanted: int64[n], tokens that each has to run, at least one; longest running first; n <= `budget`.
        budget: tokens of the step.
        keeps_seat: somebody waits who could come in. If the budget has more than n tokens, one at least is
            left over for that.
    """
    (reading,) = (wanted > 1).nonzero()
    if len(reading) == 0:
        return wanted
    counts = wanted.copy()
    rest = budget - (len(wanted) - len(reading))
    num_others = len(reading) - 1 + keeps_seat
    if num_others == 0:
        counts[reading[0]] = min(int(wanted[reading[0]]), rest)
        return counts
    half = max(1, rest // 2)
    first = min(int(wanted[reading[0]]), half)
    pot = rest - first
    if keeps_seat:
        pot -= min(pot, half, max(pot // num_others, LEAST_PIECE))
    counts[reading[0]] = first
    others = reading[1:]
    others = others[wanted[others].argsort(kind="stable")]
    share = min(half, max(LEAST_PIECE, pot // max(1, len(others))))
    pieces = np.minimum(wanted[others], share)
    counts[others] = np.clip(pot - (pieces.cumsum() - pieces), 0, pieces)
    return counts


def pace_documents(counts: Counts, documents: npt.NDArray[np.bool_], most: int) -> Counts:
    """Cuts what documents run to `most` tokens together, the longest running first; some may get none.

    Nothing is cut when only documents would run.

    Args:
        counts: int64[n], tokens that each running request would run.
        documents: bool[n], which of them read a document.
        most: see `streamserve.engine.pacing`.
    """
    (rows,) = documents.nonzero()
    if len(rows) == 0 or not counts[~documents].any():
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
