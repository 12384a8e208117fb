"""Steps for backends that read `PagedMetadata`, and the truth about them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.attention.metadata import PagedMetadata
from streamserve.worker.attention.variant import AttentionVariant
from streamserve.worker.batch import BatchShape
from streamserve.worker.kv_cache import KVCache

# What rows that belong to no request hold in `out` before a step, and must hold behind it.
UNTOUCHED = 77.0


@dataclass(frozen=True)
class Heads:
    """Shape of an attention layer, and what it leaves out.

    Attributes:
        num_heads, num_kv_heads, head_dim: its shape.
        window: keys that a query sees; 0 is all.
        soft_cap: 0 is off.
    """

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    window: int = 0
    soft_cap: float = 0.0


class PagedRig:
    """A cache full of junk, infinities among it, and steps of requests whose history is known.

    Args:
        heads: of the layer under test, which is the second of two.
        page: tokens in a block.
        dtype: of cache and activations.
        width: of the block table.
        num_blocks: of the cache.
        device: where all of it is.
    """

    LAYER = 1

    def __init__(
        self,
        heads: Heads,
        page: int,
        dtype: torch.dtype = torch.float32,
        width: int = 8,
        num_blocks: int = 40,
        *,
        device: torch.device | None = None,
    ) -> None:
        self.heads, self.page, self.dtype, self.width = heads, page, dtype, width
        self.device = device or torch.device("cpu")
        self.random = torch.Generator().manual_seed(0)
        shape = (num_blocks, page, heads.num_kv_heads, heads.head_dim)

        def junk() -> torch.Tensor:
            return torch.full(shape, torch.inf, dtype=dtype, device=self.device)

        self.cache = KVCache([junk(), junk()], [junk(), junk()])

    @property
    def batch_shape(self) -> BatchShape:
        return BatchShape(8, 256, self.width * self.page, self.page)

    @property
    def variant(self) -> AttentionVariant:
        return AttentionVariant(self.heads.num_heads, self.heads.window, self.heads.soft_cap)

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.device, self.dtype)

    def check(
        self,
        backend: AttentionBackend,
        rows: Sequence[tuple[int, int]],
        *,
        padding: tuple[int, int] = (0, 0),
        max_seq_len: int | None = None,
        tolerance: float = 2e-6,
    ) -> torch.Tensor:
        """One step of requests with (tokens in the cache, tokens to run), against the truth.

        Args:
            backend: bound to `cache`.
            rows: the requests.
            padding: rows and requests that belong to nobody.
            max_seq_len: what the metadata says; None is the truth.
            tolerance: absolute and relative.

        Returns:
            `out` of the step.
        """
        heads, step = self.heads, self._step(rows, padding, max_seq_len)
        count = step.num_tokens
        histories = self._fill(rows, step)
        shape = (count, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        qkv = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device, self.dtype)
        # Strided, as the model hands them over.
        q, k, v = qkv.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), 1)
        width = heads.num_heads * heads.head_dim
        out = torch.full((count, width), UNTOUCHED, dtype=self.dtype, device=self.device)
        backend.forward(q, k, v, out, layer=self.LAYER, metadata=step)
        start = 0
        for (_, num_new), (keys, values) in zip(rows, histories, strict=True):
            part = slice(start, start + num_new)
            truth = attend(q[part], torch.cat((keys, k[part])), torch.cat((values, v[part])), heads)
            torch.testing.assert_close(out[part].double(), truth, rtol=tolerance, atol=tolerance)
            start += num_new
        self._check_cache(step, k, v)
        return out

    def _step(
        self, rows: Sequence[tuple[int, int]], padding: tuple[int, int], max_seq_len: int | None
    ) -> PagedMetadata:
        """Blocks of the requests are dealt in random order."""
        query_lens = [new for _, new in rows] + [0] * padding[1]
        seq_lens = [before + new for before, new in rows] + [0] * padding[1]
        blocks = torch.randperm(len(self.cache.keys[0]), generator=self.random).tolist()
        table = torch.zeros((len(seq_lens), self.width), dtype=torch.int32)
        slots: list[int] = []
        for index, (before, new) in enumerate(rows):
            needed = -(-(before + new) // self.page)
            table[index, :needed] = torch.tensor([blocks.pop() for _ in range(needed)], dtype=torch.int32)
            slots += [
                int(table[index, at // self.page]) * self.page + at % self.page
                for at in range(before, before + new)
            ]
        slots += [-1] * padding[0]
        return PagedMetadata(
            num_tokens=len(slots),
            num_reqs=len(seq_lens),
            max_query_len=max(query_lens),
            max_seq_len=max_seq_len or max(seq_lens),
            query_start=torch.from_numpy(np.cumsum([0, *query_lens], dtype=np.int32)).to(self.device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            block_table=table.to(self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
        )

    def _fill(
        self, rows: Sequence[tuple[int, int]], step: PagedMetadata
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Puts a random history of each request into the cache, the same one whatever its batch mates."""
        histories = []
        for index, (before, _) in enumerate(rows):
            generator = torch.Generator().manual_seed(index)
            shape = (2, before, self.heads.num_kv_heads, self.heads.head_dim)
            pair = torch.randn(shape, generator=generator).to(self.device, self.dtype)
            at = torch.arange(before, device=self.device)
            blocks = step.block_table[index, at // self.page]
            for cache, history in zip((self.cache.keys, self.cache.values), pair, strict=True):
                cache[self.LAYER][blocks, at % self.page] = history
            histories.append((pair[0], pair[1]))
        self._before = [part[self.LAYER].clone() for part in (self.cache.keys, self.cache.values)]
        return histories

    def _check_cache(self, step: PagedMetadata, k: torch.Tensor, v: torch.Tensor) -> None:
        """The step's K and V are in their slots, bit for bit, and nothing else has changed."""
        is_real = step.slot_mapping >= 0
        slots = step.slot_mapping[is_real]
        for cache, before, new in zip(
            (self.cache.keys, self.cache.values), self._before, (k, v), strict=True
        ):
            before.flatten(0, 1)[slots] = new[is_real]
            assert torch.equal(cache[self.LAYER], before)
            assert cache[1 - self.LAYER].isinf().all()


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Causal attention of the last positions, written out: float64[len(q), num_heads * head_dim]."""
    count, total = len(q), len(keys)
    position = torch.arange(total - count, total, device=q.device)[:, None]
    distance = position - torch.arange(total, device=q.device)
    is_seen = (distance >= 0) & ((distance < heads.window) if heads.window else True)
    group = heads.num_heads // heads.num_kv_heads
    q64, k64, v64 = (part.double().transpose(0, 1) for part in (q, keys, values))
    k64, v64 = k64.repeat_interleave(group, 0), v64.repeat_interleave(group, 0)
    scores = q64 @ k64.mT * heads.head_dim**-0.5
    if heads.soft_cap:
        scores = heads.soft_cap * torch.tanh(scores / heads.soft_cap)
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return (weights @ v64).transpose(0, 1).flatten(1)
