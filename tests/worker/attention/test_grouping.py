"""Decode rows fall into groups with little padding."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamserve.worker.attention.grouping import RowGroup, group_rows

lengths = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 50_000)), min_size=1, max_size=80)


@given(lengths=lengths, limit=st.sampled_from([64, 1_000, 16_384, 10**9]))
def test_each_row_is_in_one_group_that_is_small_and_mostly_full(lengths: list[int], limit: int) -> None:
    context_lens = np.array(lengths, dtype=np.int32)
    seen: list[int] = []
    for group in group_rows(context_lens, limit):
        rows = np.arange(len(lengths)) if group.rows is None else group.rows
        assert group.context_len == context_lens[rows].max()
        assert len(rows) == 1 or len(rows) * group.context_len <= limit
        assert group.context_len <= 128 or context_lens[rows].min() * 2 >= group.context_len
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_like_rows_stay_in_order_in_one_group() -> None:
    assert group_rows(np.array([300, 200, 299], dtype=np.int32), 10_000) == [RowGroup(None, 300)]
