"""Which decode rows are attended together: rows of one group are padded to its longest context."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Contexts up to here share a group whatever their lengths: one call costs more than the padding.
_SHORT_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows handled in one call.

    Attributes:
        rows: int64[g], their index among the decode rows, longest context first; None is all, in order.
        context_len: tokens of the longest.
    """

    rows: npt.NDArray[np.int64] | None
    context_len: int


def group_rows(context_lens: npt.NDArray[np.int32], max_padded_tokens: int) -> list[RowGroup]:
    """Splits decode rows so that at most half of a group is padding and no group is too large.

    Args:
        context_lens: int32[r], r > 0.
        max_padded_tokens: most tokens of a group, padding included; a single longer row is a group.
    """
    longest, count = int(context_lens.max()), len(context_lens)
    if longest * count <= max_padded_tokens and int(context_lens.min()) >= _shortest_with(longest):
        return [RowGroup(None, longest)]
    order = np.argsort(-context_lens, kind="stable")
    descending = context_lens[order]
    groups = []
    start = 0
    while start < count:
        longest = int(descending[start])
        end_by_length = int(np.searchsorted(-descending, -_shortest_with(longest), side="right"))
        end = min(end_by_length, start + max(1, max_padded_tokens // longest))
        groups.append(RowGroup(order[start:end], longest))
        start = end
    return groups


def _shortest_with(longest: int) -> int:
    """The shortest context that may be padded to `longest`."""
    return 0 if longest <= _SHORT_CONTEXT else (longest + 1) // 2
