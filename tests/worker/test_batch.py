"""The persistent batch: after any history it equals one that was built from scratch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_driver import Driver, Running

from streamserve.engine.step import Join, StepDiff, StepResult
from streamserve.sampling import SamplingParams
from streamserve.worker.batch import BatchShape, InputBatch, StepInputs
from streamserve.worker.sampling_columns import SamplingColumns

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
SHAPE = BatchShape(max_num_seqs=6, max_num_tokens=24, max_model_len=64, block_size=4)
COLUMNS = (
    "is_greedy",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed_keys",
    "is_plain",
    "has_rules",
    "stops_from",
    "has_penalties",
    "presence",
    "frequency",
    "repetition",
    "wants_logprobs",
    "num_top",
)


def new_batch() -> InputBatch:
    return InputBatch(SHAPE, SamplingColumns(SHAPE.max_num_seqs, 100, (2,)), CPU)


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class FakeWorker:
    """A worker whose model samples `sum of all known tokens mod 97`, and which checks itself every step."""

    def __init__(self) -> None:
        self.batch = new_batch()
        self.driver: Driver | None = None

    def execute(self, diff: StepDiff) -> StepResult:
        self.batch.apply(diff)
        step = self.batch.prepare()
        assert self.driver is not None
        check_layout(step, self.driver)
        assert_equals_rebuilt(self.batch, step)
        sampled = [int(self.batch.known_tokens(int(slot)).sum()) % 97 for slot in step.sample_slots]
        token_ids = torch.tensor(sampled, dtype=torch.int32)
        self.batch.commit(step, token_ids if sampled else None)
        return StepResult(diff.step, step.sample_slots.copy(), token_ids.numpy())


def assert_equals_rebuilt(batch: InputBatch, step: StepInputs) -> None:
    """Lays the same step out in a fresh batch, made by joining what `batch` says it holds."""
    fresh = new_batch()
    joins = []
    for slot in step.slots.tolist():
        blocks = batch.block_table[slot, : batch.num_blocks[slot]].copy()
        tokens = batch.known_tokens(slot)
        computed = int(batch.num_computed[slot])
        joins.append(Join(slot, tokens, len(tokens), computed, blocks, SamplingParams(max_tokens=1)))
    fresh.apply(StepDiff(step=0, joins=joins, slots=step.slots, num_tokens=step.query_lens))
    rebuilt = fresh.prepare()
    for name in ("slots", "query_lens", "query_offsets", "context_lens", "sample_slots", "sample_positions"):
        np.testing.assert_array_equal(getattr(step, name), getattr(rebuilt, name), err_msg=name)
    for name in ("token_ids", "positions", "slot_mapping"):
        assert torch.equal(getattr(step, name), getattr(rebuilt, name)), name
    assert (step.sample_rows is None) == (rebuilt.sample_rows is None)
    if step.sample_rows is not None:
        assert torch.equal(step.sample_rows, rebuilt.sample_rows)


def check_layout(step: StepInputs, driver: Driver) -> None:
    """The same step, worked out one token at a time."""
    positions, slot_mapping, token_ids = [], [], []
    by_slot = {request.slot: request for request in driver.requests if request.slot is not None}
    for slot, count in zip(step.slots.tolist(), step.query_lens.tolist(), strict=True):
        request: Running = by_slot[slot]
        for position in range(request.num_computed, request.num_computed + count):
            positions.append(position)
            token_ids.append(request.tokens[position])
            block = request.blocks[position // driver.block_size]
            slot_mapping.append(block * driver.block_size + position % driver.block_size)
    assert step.positions.tolist() == positions
    assert step.token_ids.tolist() == token_ids
    assert step.slot_mapping.tolist() == slot_mapping


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 20)),
        st.tuples(st.just("leave"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    ),
    min_size=1,
    max_size=40,
)


@given(actions=actions, budget=st.integers(6, 24))
@settings(max_examples=150, deadline=None)
def test_patched_equals_rebuilt_after_any_history(actions: list[tuple[str, int, int]], budget: int) -> None:
    worker = FakeWorker()
    driver = Driver(worker.execute, num_slots=6, num_blocks=100, block_size=4, budget=budget)
    worker.driver = driver
    for kind, number, num_new in actions:
        live = [request for request in driver.requests if not request.is_done]
        if kind == "add" and len(live) < SHAPE.max_num_seqs:
            prompt = [(number * 7 + i) % 90 + 3 for i in range(number)]
            driver.add(prompt, SamplingParams(max_tokens=num_new))
        elif kind in ("leave", "drop") and live:
            driver.leave(live[number % len(live)], forget=kind == "drop")
        elif kind == "step":
            for _ in range(number):
                if any(not request.is_done for request in driver.requests):
                    driver.step()
    driver.run()
    for request in driver.requests:
        known = request.tokens[: request.num_prompt]
        for token in request.output:
            assert token == sum(known) % 97
            known.append(token)


def test_a_slot_may_grow_by_several_blocks_in_one_step() -> None:
    batch = new_batch()
    params = SamplingParams(max_tokens=1)
    batch.apply(
        StepDiff(
            step=1,
            joins=[
                Join(0, int32(*range(20)), 20, 0, int32(9), params),
                Join(1, int32(*range(9)), 9, 0, int32(8, 7), params),
            ],
            append_slots=int32(0, 1, 0, 0),
            append_blocks=int32(5, 6, 4, 3),
        )
    )
    assert batch.block_table[0, :4].tolist() == [9, 5, 4, 3]
    assert batch.block_table[1, :3].tolist() == [8, 7, 6]
    assert batch.num_blocks[:2].tolist() == [4, 3]


def test_a_full_request_samples_its_last_token() -> None:
    """The token at position max_model_len is sampled though it could never be run."""
    batch = new_batch()
    tokens = np.arange(64, dtype=np.int32)
    blocks = np.arange(16, dtype=np.int32)
    join = Join(5, tokens, 64, 60, blocks, SamplingParams(max_tokens=1))
    batch.apply(StepDiff(step=1, joins=[join], slots=int32(5), num_tokens=int32(4)))
    step = batch.prepare()
    assert step.sample_positions.tolist() == [64]
    batch.commit(step, torch.tensor([77], dtype=torch.int32))
    assert batch.known_tokens(5).tolist() == [*range(64), 77]


def test_join_takes_read_only_tokens() -> None:
    batch = new_batch()
    tokens = np.frombuffer(int32(1, 2, 3).tobytes(), dtype=np.int32)
    join = Join(0, tokens, 3, 0, int32(0), SamplingParams(max_tokens=1))
    batch.apply(StepDiff(step=1, joins=[join], slots=int32(0), num_tokens=int32(3)))
    assert batch.prepare().token_ids.tolist() == [1, 2, 3]


def test_columns_of_a_reused_slot_are_those_of_the_last_join() -> None:
    batch, fresh = new_batch(), new_batch()
    old = SamplingParams(
        max_tokens=9,
        min_tokens=4,
        temperature=0.3,
        top_k=3,
        top_p=0.4,
        min_p=0.2,
        seed=8,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=3.0,
        bad_words=((1,),),
        logprobs=7,
    )
    new = SamplingParams(max_tokens=9, temperature=0.0, seed=-5)
    join = Join(2, int32(1, 2), 2, 0, int32(0), new)
    batch.apply(StepDiff(step=1, joins=[Join(2, int32(1), 1, 0, int32(0), old)]))
    batch.apply(StepDiff(step=2, leaves=int32(2), joins=[join]))
    fresh.apply(StepDiff(step=1, joins=[join]))
    for name in COLUMNS:
        patched, rebuilt = getattr(batch.columns, name)[2], getattr(fresh.columns, name)[2]
        assert np.array_equal(patched, rebuilt), name
    assert batch.columns.token_lists == {}
