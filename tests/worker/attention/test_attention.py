"""Every attention backend against plain causal attention over each request's whole history."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from native_kernels import WIDTHS, kernels
from torch.nn.functional import scaled_dot_product_attention

from streamserve.engine.step import Join, StepDiff
from streamserve.sampling import SamplingParams
from streamserve.worker.attention.base import AttentionBackend, GraphSupport
from streamserve.worker.attention.cpu_paged import CpuPagedAttention
from streamserve.worker.attention.torch_paged import TorchPagedAttention
from streamserve.worker.attention.variant import AttentionVariant
from streamserve.worker.batch import BatchShape, InputBatch
from streamserve.worker.kv_cache import KVCache
from streamserve.worker.sampling_columns import SamplingColumns

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 6, 2, 16, 2


class Rig:
    """A cache of random junk, and requests that run any number of their tokens in a step."""

    def __init__(
        self,
        block_size: int,
        dtype: torch.dtype,
        max_len: int = 4096,
        seed: int = 0,
        make: Callable[[KVCache], AttentionBackend] = TorchPagedAttention,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.block_size, self.dtype = block_size, dtype
        self.num_blocks = 3 * max_len // block_size
        shape = (self.num_blocks, block_size, KV_HEADS, HEAD_DIM)
        self.cache = KVCache(
            [self.tensor(*shape) for _ in range(LAYERS)], [self.tensor(*shape) for _ in range(LAYERS)]
        )
        self.backend = make(self.cache)
        self.batch = InputBatch(BatchShape(24, 8192, max_len, block_size), SamplingColumns(24, 10, ()), CPU)
        self.backend.bind(self.batch)
        self.free = np.random.default_rng(seed).permutation(self.num_blocks).astype(np.int32)
        self.history: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def join(self, slot: int, num_computed: int, num_known: int) -> Join:
        """A request with `num_computed` tokens in the cache of every layer."""
        count = -(-num_known // self.block_size)
        blocks, self.free = self.free[:count], self.free[count:]
        keys, values = (self.tensor(LAYERS, num_computed, KV_HEADS, HEAD_DIM) for _ in range(2))
        self.history[slot] = (keys, values)
        for layer in range(LAYERS):
            for position in range(num_computed):
                block, offset = blocks[position // self.block_size], position % self.block_size
                self.cache.keys[layer][block, offset] = keys[layer, position]
                self.cache.values[layer][block, offset] = values[layer, position]
        tokens = np.zeros(num_known, dtype=np.int32)
        return Join(slot, tokens, num_known, num_computed, blocks, SamplingParams(max_tokens=1))

    def check(self, rows: list[tuple[int, int]]) -> None:
        """One step of requests with (tokens in the cache, tokens to run), against the reference."""
        joins = [self.join(slot, before, before + count) for slot, (before, count) in enumerate(rows)]
        counts = np.array([count for _, count in rows], dtype=np.int32)
        slots = np.arange(len(rows), dtype=np.int32)
        self.batch.apply(StepDiff(step=1, joins=joins, slots=slots, num_tokens=counts))
        step = self.batch.prepare()
        metadata = self.backend.build(self.batch, step)
        total = int(counts.sum())
        for layer in range(LAYERS):
            # Strided, as the model hands them over.
            qk, v = self.tensor(total, HEADS + KV_HEADS, HEAD_DIM), self.tensor(total, KV_HEADS, HEAD_DIM)
            q, k = qk[:, :HEADS], qk[:, HEADS:]
            out = torch.full((total, HEADS * HEAD_DIM), torch.nan, dtype=self.dtype)
            self.backend.forward(q, k, v, out, layer=layer, metadata=metadata)
            start = 0
            for slot, (_, count) in enumerate(rows):
                part = slice(start, start + count)
                keys = torch.cat((self.history[slot][0][layer], k[part]))
                values = torch.cat((self.history[slot][1][layer], v[part]))
                expected = reference(q[part], keys, values)
                tolerance = 2e-5 if self.dtype == torch.float32 else 2e-2
                torch.testing.assert_close(out[part], expected, rtol=tolerance, atol=tolerance)
                start += count


def native(cache: KVCache) -> AttentionBackend:
    """The kernels as this machine serves with them."""
    return CpuPagedAttention(cache, AttentionVariant(HEADS), kernels(WIDTHS[0]))


BACKENDS = pytest.mark.parametrize("make", [TorchPagedAttention, native], ids=["torch", "cpu"])


def reference(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64 with an explicit mask, [n, heads * head_dim]."""
    count, total = len(q), len(keys)
    mask = torch.ones(count, total, dtype=torch.bool).tril(total - count)
    q64, k64, v64 = (x.double().transpose(0, 1) for x in (q, keys, values))
    k64, v64 = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k64, v64))
    return scaled_dot_product_attention(q64, k64, v64, attn_mask=mask).transpose(0, 1).flatten(1).to(q.dtype)


STEPS = {
    "one decode": [(40, 1)],
    "first token": [(0, 1)],
    "decodes of one length": [(33, 1)] * 5,
    "decodes around a block boundary": [(14, 1), (15, 1), (16, 1), (17, 1)],
    "decodes far apart": [(3, 1), (900, 1), (20, 1), (400, 1), (880, 1), (0, 1)],
    "first chunk": [(0, 50)],
    "later chunk": [(50, 30)],
    "later chunk longer than a tile": [(100, 700)],
    "many short prompts": [(0, 5), (0, 17), (0, 2), (0, 16)],
    "prefix hits": [(16, 1), (32, 20), (48, 16)],
    "everything at once": [(70, 1), (0, 33), (128, 40), (5, 1), (300, 1), (0, 1), (640, 300), (16, 16)],
}


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(
    ("block_size", "dtype"), [(16, torch.float32), (5, torch.float32), (32, torch.bfloat16)]
)
@BACKENDS
def test_equals_plain_attention(
    rows: list[tuple[int, int]],
    block_size: int,
    dtype: torch.dtype,
    make: Callable[[KVCache], AttentionBackend],
) -> None:
    Rig(block_size, dtype, make=make).check(rows)


@pytest.mark.parametrize("seed", range(8))
@BACKENDS
def test_random_steps(seed: int, make: Callable[[KVCache], AttentionBackend]) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(int(rng.integers(1, 20))):
        count = 1 if rng.random() < 0.6 else int(rng.integers(2, 90))
        rows.append((int(rng.integers(0, 300)), count))
    Rig(16, torch.float32, seed=seed, make=make).check(rows)


def test_groups_split_when_they_grow_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamserve.worker.attention.torch_paged._GROUP_BYTES", 1 << 14)
    Rig(16, torch.float32).check([(100 + 7 * i, 1) for i in range(20)])


def test_a_late_chunk_of_a_long_prompt_stays_small() -> None:
    """2048 queries at 48,000 tokens of context: their scores would be 2.4 GB; no tensor is over 40 MB."""
    rig = Rig(16, torch.float32, max_len=51_200)
    before, count = 48_000, 2_048
    blocks = rig.free[: -(-(before + count) // 16)]
    tokens = np.zeros(before + count, dtype=np.int32)
    join = Join(0, tokens, before + count, before, blocks, SamplingParams(max_tokens=1))
    run = (np.zeros(1, dtype=np.int32), np.array([count], dtype=np.int32))
    rig.batch.apply(StepDiff(step=1, joins=[join], slots=run[0], num_tokens=run[1]))
    step = rig.batch.prepare()
    q, k = rig.tensor(count, HEADS, HEAD_DIM), rig.tensor(count, KV_HEADS, HEAD_DIM)
    out = torch.empty(count, HEADS * HEAD_DIM)
    with torch.profiler.profile(profile_memory=True) as profile:
        metadata = rig.backend.build(rig.batch, step)
        rig.backend.forward(q, k, k, out, layer=0, metadata=metadata)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < 40 << 20


@pytest.mark.parametrize("junk", [torch.inf, -torch.inf, torch.nan])
def test_float16_overflow_stays_with_its_request(junk: float) -> None:
    """Its blocks are padding of another request in the next step and belong to one in the step after."""
    rig = Rig(16, torch.float16)
    broken = rig.join(0, 0, 48)
    rig.batch.apply(
        StepDiff(step=1, joins=[broken], slots=np.zeros(1, np.int32), num_tokens=np.array([48], np.int32))
    )
    step = rig.batch.prepare()
    k = torch.full((48, KV_HEADS, HEAD_DIM), junk, dtype=torch.float16)
    out = torch.empty(48, HEADS * HEAD_DIM, dtype=torch.float16)
    metadata = rig.backend.build(rig.batch, step)
    for layer in range(LAYERS):
        rig.backend.forward(rig.tensor(48, HEADS, HEAD_DIM), k, k, out, layer=layer, metadata=metadata)
    # Slot 0 goes to a short request, so its block table still names the old blocks behind the new one.
    rig.check([(3, 1), (40, 1), (30, 1)])
    rig.free = np.concatenate((broken.blocks, rig.free))
    rig.check([(17, 1), (3, 1), (40, 1), (10, 20)])


def test_declares_what_it_can() -> None:
    assert TorchPagedAttention.graph_support is GraphSupport.NEVER
    assert TorchPagedAttention.supports_block_size(1)
    assert not TorchPagedAttention.supports_block_size(0)
    assert CpuPagedAttention.graph_support is GraphSupport.ALWAYS
    assert CpuPagedAttention.supports_block_size(1)
    assert not CpuPagedAttention.supports_block_size(0)
