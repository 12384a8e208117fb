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

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamserve.engine.scheduler.table import Counts

# Tokens of a prompt that are worth a call of attention of their own.
LEAST_PIECE = 64


class Pace(NamedTuple):
    """How much a step may read beside others.

    Attributes:
        prompt_tokens: most tokens by which all are brought forward who do not decode, if anybody decodes in
            the step; None for no limit but the budget.
        document_tokens: most tokens of those by which documents are read if anybody else runs; None for no
            limit.
    """

    prompt_tokens: int | None = None
    document_tokens: int | None = None

    def budget(self, most: int, num_decodes: int) -> int:
        """Tokens of a step of at most `most` in which so many requests decode."""
        if self.prompt_tokens is None or num_decodes == 0:
            return most
        return min(most, num_decodes + self.prompt_tokens)


UNPACED = Pace()


def share_budget(wanted: Counts, budget: int, *, keeps_seat: bool) -> Counts:
    """How many tokens each running request runs, all together at most `budget`.

    At least one for each that wants just one, and for the longest running of those that want more, if the
    budget has any for them.

    Args:
        wanted: int64[n], tokens that each has to run; longest running first. 0 is nobody's turn.
        budget: tokens of the step; no less than there are that want just one.
        keeps_seat: somebody waits who could come in. If the budget has more than n tokens, one at least is
            left over for that.
    """
    (reading,) = (wanted > 1).nonzero()
    if len(reading) == 0:
        return wanted
    counts = wanted.copy()
    rest = budget - int(np.count_nonzero(wanted == 1))
    if rest <= 0:
        counts[reading] = 0
        return counts
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
    """Cuts what documents want to `most` tokens together, the longest running first; some may get none.

    Nothing is cut when only documents would run.

    Args:
        counts: int64[n], tokens that each running request wants to run.
        documents: bool[n], which of them read a document.
        most: see `Pace`.
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
