"""The hand-over of one stream: merging, order, slots and generations."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from streamserve.errors import EngineUnavailable, RequestFailed
from streamserve.frontend.mailbox import Delta, Mailbox, StreamTable
from streamserve.messages import Finish, Logprobs

NONE, LENGTH = int(Finish.NONE), int(Finish.LENGTH)


async def test_a_mailbox_merges_what_waits() -> None:
    box = Mailbox(1)
    box.put([1, 2], NONE)
    box.put([3], NONE)
    assert await box.get() == Delta([1, 2, 3], NONE)
    getting = asyncio.ensure_future(box.get())
    await asyncio.sleep(0)
    assert not getting.done()
    box.put([4], LENGTH)
    assert await getting == Delta([4], LENGTH)


async def test_a_cancelled_get_loses_nothing() -> None:
    box = Mailbox(1)
    getting = asyncio.ensure_future(box.get())
    await asyncio.sleep(0)
    getting.cancel()
    box.put([1], NONE)
    await asyncio.wait([getting])
    assert await box.get() == Delta([1], NONE)


async def test_the_first_failure_counts() -> None:
    box = Mailbox(1)
    box.fail(RequestFailed("first"))
    box.fail(EngineUnavailable("second"))
    with pytest.raises(RequestFailed, match="first"):
        await box.get()


def test_slots_are_reused_under_a_new_generation() -> None:
    table = StreamTable()
    first, second = table.open(), table.open()
    assert len(table) == 2
    table.close(first)
    third = table.open()
    assert third.stream & 0xFFFFFFFF == first.stream & 0xFFFFFFFF
    assert third.stream != first.stream
    assert table.find(first.stream) is None
    assert table.find(third.stream) is third
    assert table.find(second.stream) is second
    assert table.find(1 << 32 | 77) is None
    assert len(table.slots) == 2


async def test_log_probabilities_are_merged_with_their_tokens() -> None:
    box = Mailbox(1, num_top=2)
    for tokens in ([1, 2], [3]):
        box.put_logprobs(logprobs_of(tokens, 5))
        box.put(tokens, NONE)
    delta = await box.get()
    assert delta.tokens == [1, 2, 3]
    assert delta.logprobs is not None
    assert delta.logprobs.chosen.tolist() == [1, 2, 3]
    assert delta.logprobs.top.tolist() == [[1, 0], [2, 1], [3, 2]]
    box.put([], LENGTH)
    delta = await box.get()
    assert delta.logprobs is not None
    assert delta.logprobs.top.shape == delta.logprobs.top_ids.shape == (0, 2)


async def test_without_being_asked_for_there_are_no_log_probabilities() -> None:
    box = Mailbox(1)
    box.put([1], NONE)
    assert (await box.get()).logprobs is None
    assert box.take_prompt_logprobs() is None


def test_log_probabilities_of_a_prompt_come_in_parts() -> None:
    box = Mailbox(1, num_prompt_top=1)
    box.put_prompt_logprobs(logprobs_of([1, 2], 3))
    box.put_prompt_logprobs(logprobs_of([3], 3))
    rows = box.take_prompt_logprobs()
    assert rows is not None
    assert rows.chosen.tolist() == [1, 2, 3]
    assert rows.top.shape == (3, 1)
    rows = Mailbox(1, num_prompt_top=3).take_prompt_logprobs()
    assert rows is not None
    assert rows.top.shape == (0, 3)


async def test_a_stream_ended_from_this_side_gets_nothing_later() -> None:
    table = StreamTable()
    box = table.open()
    box.put([1], NONE)
    table.end(box, Finish.ABORT)
    assert table.find(box.stream) is None
    assert await box.get() == Delta([1], Finish.ABORT)
    other = table.open()
    assert other.stream & 0xFFFFFFFF != box.stream & 0xFFFFFFFF
    assert len(table) == 2
    table.close(box)
    table.close(other)
    assert len(table) == 0


def logprobs_of(tokens: list[int], width: int) -> Logprobs:
    chosen = np.array(tokens, dtype=np.float32)
    columns = np.arange(width)
    ids = (chosen[:, None] * 0 + columns).astype(np.int32)
    return Logprobs(chosen, ids, (chosen[:, None] - columns).astype(np.float32))
