"""Paged attention by native kernels for CPUs, which read K and V where they are in the cache.

The kernels are compiled for the machine when they are first wanted (`worker.native`). They are operators
of torch and read all that differs between steps from memory at fixed addresses, so emulated graphs can hold
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from streamserve.worker.attention.base import AttentionBackend, GraphSupport
from streamserve.worker.attention.variant import AttentionVariant
from streamserve.worker.batch import InputBatch, StepInputs
from streamserve.worker.graphs.descriptor import BatchDescriptor
from streamserve.worker.kv_cache import KVCache
from streamserve.worker.native.operators import Operators


@dataclass(frozen=True, slots=True)
class CpuMetadata:
    """One step, perhaps padded to the size of a captured graph: views of persistent memory.

    A request of padding has no query tokens and no keys; a row of padding has slot -1 and no request.

    Attributes:
        slot_mapping: int64[num_tokens], where in the cache each token's K and V go; -1 is nowhere.
        block_tables: int32[max_num_seqs, width], those of the batch.
        slots: int32[num_reqs], rows of them.
        query_start: int32[num_reqs + 1], where each one's rows begin.
        context: int32[num_reqs], keys that the last query token of each sees.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    context: torch.Tensor


class _StepMemory:
    """What every step is written into, and the batch's own block tables, which are up to date as they are."""

    def __init__(self, batch: InputBatch) -> None:
        max_num_seqs = batch.shape.max_num_seqs
        self._block_tables = torch.from_numpy(batch.block_table)
        self._slots = torch.zeros(max_num_seqs, dtype=torch.int32)
        self.query_start = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self._context = torch.zeros(max_num_seqs, dtype=torch.int32)
        # The three as arrays, which are faster to write.
        self.host = (self._slots.numpy(), self.query_start.numpy(), self._context.numpy())

    def metadata(self, num_reqs: int, slot_mapping: torch.Tensor) -> CpuMetadata:
        """Of a step with so many requests."""
        return CpuMetadata(
            slot_mapping,
            self._block_tables,
            self._slots[:num_reqs],
            self.query_start[: num_reqs + 1],
            self._context[:num_reqs],
        )


class CpuPagedAttention(AttentionBackend):
    """Calls the operator `attend`, for prefill and decode alike. It serves one batch.

    Args:
        cache: the paged KV cache, in float32 or bfloat16.
        variant: what the model asks for.
        operators: the native kernels.
    """

    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    def __init__(self, cache: KVCache, variant: AttentionVariant, operators: Operators) -> None:
        self._cache = cache
        self._attend = operators.attend
        self._window, self._soft_cap = variant.sliding_window, variant.soft_cap
        self._scale = 1 / math.sqrt(cache.keys[0].shape[3])
        self._memory: _StepMemory | None = None

    @staticmethod
    def supports_block_size(block_size: int) -> bool:
        """Any."""
        return block_size >= 1

    def bind(self, batch: InputBatch) -> None:
        """See `AttentionBackend.bind`."""
        self._memory_for(batch)

    def build(
        self, batch: InputBatch, step: StepInputs, *, padded: BatchDescriptor | None = None
    ) -> CpuMetadata:
        """See `AttentionBackend.build`. Hot: once a step."""
        num_reqs, memory = len(step.slots), self._memory_for(batch)
        slots, query_start, context = memory.host
        slots[:num_reqs] = step.slots
        query_start[: num_reqs + 1] = step.query_offsets
        context[:num_reqs] = step.context_lens
        if padded is None:
            return memory.metadata(num_reqs, step.slot_mapping)
        assert padded.num_reqs is not None, "the shape of a PIECEWISE graph is none for attention"
        query_start[num_reqs + 1 : padded.num_reqs + 1] = step.num_tokens
        slot_mapping = batch.rows(padded.num_tokens).slot_mapping
        if padded.num_tokens > step.num_tokens:
            slot_mapping[step.num_tokens :].fill_(-1)
        return memory.metadata(padded.num_reqs, slot_mapping)

    def build_for_capture(self, batch: InputBatch, padded: BatchDescriptor) -> CpuMetadata:
        """See `AttentionBackend.build_for_capture`: nobody has a query token."""
        assert padded.num_reqs is not None, "the shape of a PIECEWISE graph is none for attention"
        memory = self._memory_for(batch)
        memory.query_start.zero_()
        return memory.metadata(padded.num_reqs, batch.rows(padded.num_tokens).slot_mapping.fill_(-1))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        layer: int,
        metadata: Any,
    ) -> None:
        """See `AttentionBackend.forward`; rows that belong to no request are left as they are.

        Hot: once a layer and step.
        """
        self._attend(
            q,
            k,
            v,
            out,
            self._cache.keys[layer],
            self._cache.values[layer],
            metadata.slot_mapping,
            metadata.block_tables,
            metadata.slots,
            metadata.query_start,
            metadata.context,
            self._window,
            self._soft_cap,
            self._scale,
        )

    def _memory_for(self, batch: InputBatch) -> _StepMemory:
        if self._memory is None:
            self._memory = _StepMemory(batch)
        return self._memory
