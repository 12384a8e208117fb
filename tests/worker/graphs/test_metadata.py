"""What attention is told of a step, in buffers that stay where they are and are sent only what is new."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from graph_rig import NUM_BLOCKS, SHAPE, play
from numpy.testing import assert_array_equal

from streamserve.engine.step import Join, StepDiff, StepResult
from streamserve.sampling import SamplingParams
from streamserve.worker.attention.metadata import DeviceBlockTables, PagedMetadata, PagedMetadataBuilder
from streamserve.worker.batch import BatchShape, InputBatch, StepInputs
from streamserve.worker.graphs.descriptor import BatchDescriptor
from streamserve.worker.graphs.dispatcher import GraphDispatcher
from streamserve.worker.graphs.mode import CUDAGraphMode, RuntimeMode
from streamserve.worker.link import HostLink
from streamserve.worker.sampling_columns import SamplingColumns

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def make_batch(shape: BatchShape = SHAPE) -> InputBatch:
    return InputBatch(shape, SamplingColumns(shape.max_num_seqs, 512, ()), CPU)


def check_real_rows(metadata: PagedMetadata, batch: InputBatch, step: StepInputs) -> None:
    """The requests of the step, by what the host knows."""
    count = len(step.slots)
    assert_array_equal(metadata.query_start[: count + 1].numpy(), step.query_offsets)
    assert_array_equal(metadata.seq_lens[:count].numpy(), step.context_lens)
    for row, slot in enumerate(step.slots.tolist()):
        blocks = batch.block_table[slot, : batch.num_blocks[slot]]
        assert_array_equal(metadata.block_table[row, : len(blocks)].numpy(), blocks)
    tables = batch.block_table[step.slots]
    position = step.positions.numpy()
    table = np.repeat(tables, step.query_lens, axis=0)
    block = table[np.arange(len(position)), position // SHAPE.block_size]
    slots = block * SHAPE.block_size + position % SHAPE.block_size
    assert_array_equal(metadata.slot_mapping[: len(slots)].numpy(), slots)


def check_padding(metadata: PagedMetadata, step: StepInputs) -> None:
    """Nothing is written, nobody asks, nothing is looked at, and every block is one that there is."""
    count = len(step.slots)
    assert (metadata.slot_mapping[step.num_tokens :] == -1).all()
    assert (metadata.seq_lens[count:] == 0).all()
    assert (metadata.query_start[count:] == step.num_tokens).all()
    assert ((metadata.block_table >= 0) & (metadata.block_table < NUM_BLOCKS)).all()


class Follower:
    """Stands in for a worker in a random day and looks at the metadata of each step."""

    def __init__(self) -> None:
        self.batch = make_batch()
        self.builder = PagedMetadataBuilder(SHAPE, HostLink())
        self.dispatcher = GraphDispatcher(CUDAGraphMode.FULL, (1, 2, 4, 8, 16, 32), SHAPE.max_num_seqs)
        self.decodes = GraphDispatcher(
            CUDAGraphMode.FULL_DECODE_ONLY, (1, 2, 4, 8, 16, 32), SHAPE.max_num_seqs
        )
        self.rng = random.Random(1)
        self.addresses: set[tuple[int, ...]] = set()
        self.padded = 0

    def execute(self, diff: StepDiff) -> StepResult:
        self.batch.apply(diff)
        step = self.batch.prepare()
        sampled = torch.full((len(step.sample_slots),), 5, dtype=torch.int32)
        if step.num_tokens:
            self.look(step)
        self.batch.commit(step, sampled if len(sampled) else None)
        return StepResult(diff.step, step.sample_slots, sampled.numpy())

    def look(self, step: StepInputs) -> None:
        uniform = step.num_tokens == len(step.slots)
        dispatcher = self.rng.choice((self.dispatcher, self.decodes))
        mode, padded = dispatcher.dispatch(BatchDescriptor(step.num_tokens, len(step.slots), uniform))
        if mode is RuntimeMode.NONE:
            metadata = self.builder.build(self.batch, step)
            assert (metadata.num_tokens, metadata.num_reqs) == (step.num_tokens, len(step.slots))
            assert metadata.max_query_len == step.query_lens.max()
            assert metadata.max_seq_len == step.context_lens.max()
        else:
            metadata = self.builder.build(self.batch, step, padded)
            assert (metadata.num_tokens, metadata.num_reqs) == (padded.num_tokens, padded.num_reqs)
            assert metadata.max_query_len == (1 if padded.uniform else padded.num_tokens)
            assert metadata.max_seq_len == SHAPE.max_model_len
            self.padded += 1
        check_real_rows(metadata, self.batch, step)
        check_padding(metadata, step)
        tensors = (metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.slot_mapping)
        assert [len(tensor) for tensor in tensors] == [
            metadata.num_reqs + 1,
            metadata.num_reqs,
            metadata.num_reqs,
            metadata.num_tokens,
        ]
        self.addresses.add(tuple(tensor.data_ptr() for tensor in tensors))


@pytest.mark.parametrize("seed", range(3))
def test_a_random_day(seed: int) -> None:
    follower = Follower()
    play(follower.execute, 300, seed)
    assert follower.padded > 100
    assert len(follower.addresses) == 1


@pytest.mark.parametrize(
    ("shape", "query_start", "max_query_len"),
    [
        (BatchDescriptor(4, 4, True), [0, 1, 2, 3, 4], 1),
        (BatchDescriptor(6, 3, True), [0, 2, 4, 6], 2),
        (BatchDescriptor(11, 4, False), [0, 2, 4, 6, 11], 11),
        (BatchDescriptor(1, 1, False), [0, 1], 1),
    ],
)
def test_the_step_that_a_graph_is_captured_with(
    shape: BatchDescriptor, query_start: list[int], max_query_len: int
) -> None:
    """It writes nothing and has something to do; steps after it are as if it had not been."""
    batch, builder = make_batch(), PagedMetadataBuilder(SHAPE, HostLink())
    batch.apply(joining([40, 3]))
    before = builder.build(batch, batch.prepare())
    captured = builder.build_for_capture(batch, shape)
    assert captured.query_start.tolist() == query_start
    assert captured.seq_lens.tolist() == np.diff(query_start).tolist()
    assert captured.slot_mapping.tolist() == [-1] * shape.num_tokens
    assert (captured.max_query_len, captured.max_seq_len) == (max_query_len, SHAPE.max_model_len)
    step = batch.prepare()
    after = builder.build(batch, step)
    check_real_rows(after, batch, step)
    assert after.query_start.data_ptr() == before.query_start.data_ptr() == captured.query_start.data_ptr()


def joining(lengths: list[int]) -> StepDiff:
    """Requests with so many tokens, each but the last in the cache."""
    free = iter(range(1, NUM_BLOCKS))
    joins = [
        Join(
            slot=slot,
            tokens=np.full(length, 5, dtype=np.int32),
            num_prompt=length,
            num_computed=length - 1,
            blocks=np.array([next(free) for _ in range(-(-length // SHAPE.block_size))], dtype=np.int32),
            params=SamplingParams(max_tokens=99, temperature=0.0),
        )
        for slot, length in enumerate(lengths)
    ]
    slots = np.arange(len(lengths), dtype=np.int32)
    return StepDiff(step=0, joins=joins, slots=slots, num_tokens=np.ones_like(slots))


def test_only_new_blocks_are_sent() -> None:
    """A steady decode sends nothing, a block boundary one entry, a join its table."""
    sent: list[int] = []

    class Link(HostLink):
        def upload(self, array: np.ndarray) -> torch.Tensor:
            sent.append(len(array))
            return super().upload(array)

    tables = DeviceBlockTables(SHAPE, Link())
    batch = make_batch()

    def step(diff: StepDiff) -> list[int]:
        sent.clear()
        batch.apply(diff)
        step = batch.prepare()
        tables.update(batch, step)
        for slot in step.slots.tolist():
            blocks = batch.block_table[slot, : batch.num_blocks[slot]]
            assert_array_equal(tables.rows[slot, : len(blocks)].numpy(), blocks)
        # Where each entry goes, and the entry.
        assert sent[::2] == sent[1::2]
        return sent[::2]

    slots = np.arange(2, dtype=np.int32)
    assert step(joining([100, 60])) == [11]
    assert step(StepDiff(step=1)) == []
    assert step(StepDiff(step=2, append_slots=slots[:1], append_blocks=slots[:1] + 70)) == [1]
    assert step(StepDiff(step=3)) == []
    again = joining([33])
    assert step(StepDiff(step=4, leaves=slots[:1], joins=again.joins, slots=slots, num_tokens=slots + 1)) == [
        3
    ]


def test_a_slot_with_as_many_blocks_as_the_one_before() -> None:
    """The count alone does not tell that the blocks are others."""
    batch, builder = make_batch(), PagedMetadataBuilder(SHAPE, HostLink())
    batch.apply(joining([40]))
    builder.build(batch, batch.prepare())
    (join,) = joining([40]).joins
    other = Join(join.slot, join.tokens, join.num_prompt, join.num_computed, join.blocks + 9, join.params)
    batch.apply(StepDiff(step=1, leaves=np.zeros(1, dtype=np.int32), joins=[other]))
    step = batch.prepare()
    check_real_rows(builder.build(batch, step), batch, step)
