"""The Triton kernels in Triton's interpreter, against attention written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_launches import KernelLaunches

from loadtest.gpu_check.paged_steps import UNTOUCHED, Heads, PagedRig, attend
from streamserve.engine.step import Join, StepDiff
from streamserve.sampling import SamplingParams
from streamserve.worker.attention.base import GraphSupport
from streamserve.worker.attention.metadata import PagedMetadata
from streamserve.worker.batch import InputBatch
from streamserve.worker.sampling_columns import SamplingColumns

pytest.importorskip("triton")

from streamserve.worker.attention import triton_paged
from streamserve.worker.attention.triton_kernels import SPLIT_STEP
from streamserve.worker.attention.triton_paged import (
    LEAST_SPLIT,
    KVStore,
    TritonPagedAttention,
    choose_max_splits,
)

pytestmark = pytest.mark.torch


def backend_for(rig: PagedRig, split_size: int = 64) -> TritonPagedAttention:
    return TritonPagedAttention(rig.cache, rig.batch_shape, rig.variant, split_size)


@pytest.mark.parametrize("page", [16, 32, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 128), (3, 1, 64)])
def test_mixed_steps(page: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Decode rows, first and later chunks, one token to several pages, rows and requests of padding."""
    rig = PagedRig(Heads(num_heads, num_kv_heads, head_dim), page)
    rows = [(page + 5, 1), (0, 1), (0, 19), (page - 1, 2), (2 * page, 9)]
    out = rig.check(backend_for(rig), rows, padding=(3, 2))
    assert (out[-3:] == UNTOUCHED).all()


@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_that_share_a_kv_head(group: int) -> None:
    rig = PagedRig(Heads(2 * group, 2), 16)
    rig.check(backend_for(rig), [(40, 1), (3, 30), (0, 1)])


# Contexts of no key, of one split exactly, of one key more, and of several splits.
DECODES = [(0, 1), (63, 1), (64, 1), (127, 1), (15, 1), (126, 1)]


@pytest.mark.parametrize(
    ("page", "window"), [(16, 0), (16, 1), (16, 40), (16, 64), (32, 0), (32, 100), (256, 0), (256, 40)]
)
def test_decode_steps(page: int, window: int) -> None:
    rig = PagedRig(Heads(window=window), page)
    rig.check(backend_for(rig), DECODES)


@pytest.mark.parametrize("window", [1, 5, 40, 64])
def test_chunks_through_a_sliding_window(window: int) -> None:
    """Narrower than a tile, so that some rows of a tile see none of its keys, and wider."""
    rig = PagedRig(Heads(window=window), 16)
    rig.check(backend_for(rig), [(0, 70), (50, 20), (37, 2), (100, 1)])


@pytest.mark.parametrize("shared_kib", [40, 99])
def test_tiles_that_fit_into_little_shared_memory(shared_kib: int) -> None:
    rig = PagedRig(Heads(6, 2, 256), 16, torch.float16)
    backend = TritonPagedAttention(rig.cache, rig.batch_shape, rig.variant, 64, shared_bytes=shared_kib << 10)
    rows, keys = backend._chunk_tile["ROWS"], backend._chunk_tile["TILE"]
    assert (rows, keys) == ((64, 32) if shared_kib == 99 else (64, 16))
    rig.check(backend, [(40, 1), (3, 70), (0, 1), (70, 1)], tolerance=4e-3)


def test_tiles_are_as_large_as_the_device_takes() -> None:
    """The largest of each compute capability: 8.0, 8.6 and 8.9, 9.0."""
    for shared_kib, dim, tile in (
        *((163, 256, (128, 64)), (99, 256, (64, 32)), (227, 256, (128, 64))),
        *((163, 128, (128, 64)), (99, 128, (128, 64)), (227, 128, (128, 64))),
    ):
        chosen = triton_paged._chunk_tile(torch.bfloat16, 4, dim, shared_kib << 10)
        assert (chosen["ROWS"], chosen["TILE"]) == tile
    with_many_heads = triton_paged._chunk_tile(torch.bfloat16, 128, 256, 99 << 10)
    assert (with_many_heads["ROWS"], with_many_heads["TILE"]) == (128, 16)


def test_scores_are_capped() -> None:
    rig = PagedRig(Heads(soft_cap=0.7), 16)
    rig.check(backend_for(rig), [(0, 20), (70, 1), (20, 1)])


def test_half_precision() -> None:
    rig = PagedRig(Heads(8, 2, 128), 16, torch.float16)
    rig.check(backend_for(rig), [(90, 1), (0, 40), (60, 33), (0, 1)], tolerance=2e-3)


def test_a_head_dimension_that_is_no_power_of_two() -> None:
    rig = PagedRig(Heads(4, 2, 80), 16)
    rig.check(backend_for(rig), [(90, 1), (7, 9)])


def test_padding_writes_nothing() -> None:
    """Padding, with a longest context as graphs have it, changes neither cache nor `out`."""
    rig = PagedRig(Heads(), 16)
    out = rig.check(backend_for(rig), [(70, 1), (3, 1)], padding=(4, 4), max_seq_len=128)
    assert (out[2:] == UNTOUCHED).all()


def test_store_skips_negative_slots() -> None:
    cache = PagedRig(Heads(3, 3, 64), 16).cache
    k, v = torch.randn(2, 4, 3, 64)
    KVStore(cache).store(k, v, torch.tensor([17, -1, 3, -1]), 0)
    for stored, new in ((cache.keys[0], k), (cache.values[0], v)):
        rows = stored.flatten(0, 1)
        assert torch.equal(rows[17], new[0])
        assert torch.equal(rows[3], new[2])
        assert rows.isinf().all((1, 2)).sum() == len(rows) - 2


def test_a_request_does_not_depend_on_its_batch_mates() -> None:
    """Bit for bit: a decode alone, among decodes, and in a step with prefill chunks."""
    results = []
    for mates in ([], [(90, 1), (3, 1)], [(20, 30), (5, 1)]):
        rig = PagedRig(Heads(), 16)
        results.append(rig.check(backend_for(rig), [(100, 1), *mates])[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("max_query_len", [1, 9])
def test_steps_of_one_shape_are_launched_alike(monkeypatch: pytest.MonkeyPatch, max_query_len: int) -> None:
    """What a FULL graph needs: the same kernels with the same arguments, and no tensor made on the way."""
    rig = PagedRig(Heads(), 16)
    backend = backend_for(rig)
    numbers = {
        "query_start": torch.zeros(5, dtype=torch.int32),
        "seq_lens": torch.zeros(4, dtype=torch.int32),
        "block_table": torch.zeros(4, 8, dtype=torch.int32),
        "slot_mapping": torch.zeros(9, dtype=torch.int64),
    }
    q, k, v, out = rig.tensor(9, 4, 64), rig.tensor(9, 2, 64), rig.tensor(9, 2, 64), rig.tensor(9, 256)
    launches = KernelLaunches(monkeypatch, triton_paged)
    seen = []
    for fill in (0, 1):
        for tensor in numbers.values():
            tensor.fill_(fill)
        step = PagedMetadata(9, 4, max_query_len, 128, **numbers)
        with launches:
            backend.forward(q, k, v, out, layer=0, metadata=step)
        seen.append([launch.key() for launch in launches.noted])
        launches.noted.clear()
    assert seen[0] == seen[1]
    names = ["store_kv_kernel", "decode_kernel", "merge_splits_kernel"] + ["chunk_kernel"] * (
        max_query_len > 1
    )
    assert [name for name, *_ in seen[0]] == names
    assert not launches.operations


def test_serves_a_batch() -> None:
    """From the scheduler's diff to the numbers, over steps that go on where the last one ended."""
    rig = PagedRig(Heads(), 16)
    backend = backend_for(rig)
    batch = InputBatch(rig.batch_shape, SamplingColumns(8, 10, ()), torch.device("cpu"))
    histories = {slot: (torch.empty(0, 2, 64), torch.empty(0, 2, 64)) for slot in (2, 5)}
    joins = [
        Join(
            slot,
            np.zeros(40, np.int32),
            40,
            0,
            np.arange(3, dtype=np.int32) + 4 * slot,
            SamplingParams(max_tokens=9),
        )
        for slot in histories
    ]
    for number, counts in enumerate([(20, 7), (1, 30), (1, 1)]):
        slots, lens = np.array([5, 2], np.int32), np.array(counts, np.int32)
        batch.apply(StepDiff(step=number, joins=joins, slots=slots, num_tokens=lens))
        joins = []
        step = batch.prepare()
        q, k, v = (rig.tensor(sum(counts), heads, 64) for heads in (4, 2, 2))
        out = torch.empty(sum(counts), 256)
        backend.forward(q, k, v, out, layer=1, metadata=backend.build(batch, step))
        start = 0
        for slot, count in zip((5, 2), counts, strict=True):
            part = slice(start, start + count)
            keys, values = histories[slot]
            histories[slot] = torch.cat((keys, k[part])), torch.cat((values, v[part]))
            truth = attend(q[part], *histories[slot], rig.heads)
            torch.testing.assert_close(out[part].double(), truth, rtol=2e-6, atol=2e-6)
            start += count
        batch.commit(step, None)


@pytest.mark.parametrize("window", [0, 100])
def test_long_requests_have_larger_splits(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Two at most: of 64, 128, 192 and 256 keys."""
    monkeypatch.setattr(triton_paged, "_MOST_PROGRAMS", 4)
    rig = PagedRig(Heads(window=window), 64)
    rig.check(backend_for(rig), [(100, 1), (128, 1), (256, 1), (257, 1), (500, 1), (0, 1)])


def test_the_number_of_splits_is_bounded() -> None:
    """And with it the memory for what they found."""
    for max_len, kv_heads, count in (
        (100, 8, 1),
        (4_096, 8, 16),
        (1_025, 8, 5),
        (131_072, 8, 16),
        (131_072, 1, 128),
        (8_192, 256, 1),
    ):
        assert choose_max_splits(max_len, kv_heads, LEAST_SPLIT) == count


def test_a_split_is_made_of_whole_tiles() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shared_kib in (48, 99, 227):
            assert SPLIT_STEP % triton_paged._decode_tile(dtype, 4, 256, shared_kib << 10)["TILE"] == 0


def test_declares_what_it_can() -> None:
    assert TritonPagedAttention.graph_support is GraphSupport.ALWAYS
    supported = [size for size in range(70) if TritonPagedAttention.supports_block_size(size)]
    assert supported == [16, 32, 48, 64]
