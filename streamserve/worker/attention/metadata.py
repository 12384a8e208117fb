"""What an attention backend whose kernels read everything from device memory must know about a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.batch import BatchShape, InputBatch, StepInputs
from streamserve.worker.device import zeros
from streamserve.worker.graphs.descriptor import BatchDescriptor
from streamserve.worker.link import DeviceLink
from streamserve.worker.staging import StagedArray


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """One step, perhaps padded to the size of a captured graph.

    All tensors are views of persistent buffers, so that a graph captured on them finds the next step's
    numbers at the same addresses. Padding rows do nothing: their slot is -1, their requests have no query
    tokens and no keys.

    Attributes:
        num_tokens: rows of q, k, v and out, padding included.
        num_reqs: requests, padding included.
        max_query_len: no request has more query tokens; 1 in a step where everybody decodes one token.
        max_seq_len: no request attends to more keys. Inside a FULL graph the longest possible one, since
            launch parameters are baked in.
        query_start: int32[num_reqs + 1] on the device, where each one's rows begin (cu_seqlens).
        seq_lens: int32[num_reqs] on the device, keys that each of them attends to; 0 for padding.
        block_table: int32[num_reqs, width] on the device; the width never changes.
        slot_mapping: int64[num_tokens] on the device, block * block_size + offset; -1 writes nothing.
    """

    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class DeviceBlockTables:
    """A copy of the batch's block tables on the device that is sent only what it lacks.

    Attributes:
        rows: int32[max_num_seqs, width], a row for each slot. Entries behind a slot's blocks are those of
            earlier requests: valid blocks, whatever is in them.

    Args:
        shape: bounds of every step.
        link: to where it is.
    """

    def __init__(self, shape: BatchShape, link: DeviceLink) -> None:
        width = -(-shape.max_model_len // shape.block_size)
        self.rows = zeros((shape.max_num_seqs, width), torch.int32, link.device)
        self._link = link

    def update(self, batch: InputBatch, step: StepInputs) -> None:
        """Brings the rows of the scheduled slots up to date. Hot: once a step."""
        have, want = batch.num_mirrored[step.slots], batch.num_blocks[step.slots]
        behind = np.flatnonzero(have < want)
        if len(behind) == 0:
            return
        slots, have, missing = step.slots[behind], have[behind], (want - have)[behind]
        before = np.cumsum(missing) - missing
        within = np.arange(int(missing.sum())) - np.repeat(before - have, missing)
        index = np.repeat(slots.astype(np.int64) * self.rows.shape[1], missing) + within
        blocks = batch.block_table.ravel()[index]
        self.rows.view(-1).index_copy_(0, self._link.upload(index), self._link.upload(blocks))
        batch.num_mirrored[slots] = batch.num_blocks[slots]


class PagedMetadataBuilder:
    """Writes each step into buffers at fixed addresses. What stays as it was is not sent again.

    Args:
        shape: bounds of every step.
        link: to where the model runs.
    """

    def __init__(self, shape: BatchShape, link: DeviceLink) -> None:
        self._shape = shape
        self._tables = DeviceBlockTables(shape, link)
        self._slots = StagedArray(shape.max_num_seqs, torch.int64, link)
        self._query_start = StagedArray(shape.max_num_seqs + 1, torch.int32, link)
        self._seq_lens = StagedArray(shape.max_num_seqs, torch.int32, link)
        self._block_table = torch.zeros_like(self._tables.rows)
        # The arrays that the buffers hold; while a batch decodes steadily it hands out the same ones.
        self._slots_held: object = None
        self._offsets_held: object = None

    def build(
        self, batch: InputBatch, step: StepInputs, padded: BatchDescriptor | None = None
    ) -> PagedMetadata:
        """The step, padded to the shape of a FULL graph if one is given. Hot: once a step."""
        num_reqs = len(step.slots)
        self._tables.update(batch, step)
        if step.slots is not self._slots_held:
            self._slots.host[:num_reqs] = step.slots
            self._slots.publish(num_reqs)
            self._slots_held = step.slots
        torch.index_select(
            self._tables.rows, 0, self._slots.device[:num_reqs], out=self._block_table[:num_reqs]
        )
        if step.query_offsets is not self._offsets_held:
            # All of it, so that requests of padding begin and end where the last real one ends.
            self._query_start.host[: num_reqs + 1] = step.query_offsets
            self._query_start.host[num_reqs + 1 :] = step.num_tokens
            self._query_start.publish(len(self._query_start.host))
            self._offsets_held = step.query_offsets
        self._seq_lens.host[:num_reqs] = step.context_lens
        if padded is None:
            return self._metadata(
                BatchDescriptor(step.num_tokens, num_reqs, False),
                int(step.query_lens.max()),
                int(step.context_lens.max()),
                step.slot_mapping,
            )
        return self._padded(batch, step, padded)

    def build_for_capture(self, batch: InputBatch, padded: BatchDescriptor) -> PagedMetadata:
        """A step of the shape of a FULL graph: padding, except that its requests have tokens and keys.

        Kernels do some of their work then, so that they are warm when it counts; nothing is written.
        """
        num_tokens, num_reqs = padded.num_tokens, _num_reqs(padded)
        query_len = num_tokens // num_reqs
        query_start = np.arange(num_reqs + 1) * query_len
        query_start[-1] = num_tokens
        self._slots_held = self._offsets_held = None
        self._query_start.host[: num_reqs + 1] = query_start
        self._query_start.host[num_reqs + 1 :] = num_tokens
        self._query_start.publish(len(self._query_start.host))
        self._seq_lens.host[:num_reqs] = np.diff(query_start)
        slot_mapping = batch.rows(num_tokens).slot_mapping.fill_(-1)
        return self._metadata(padded, _max_query_len(padded), self._shape.max_model_len, slot_mapping)

    def _padded(self, batch: InputBatch, step: StepInputs, padded: BatchDescriptor) -> PagedMetadata:
        slot_mapping = batch.rows(padded.num_tokens).slot_mapping
        if padded.num_tokens > step.num_tokens:
            slot_mapping[step.num_tokens :].fill_(-1)
        self._seq_lens.host[len(step.slots) : _num_reqs(padded)] = 0
        return self._metadata(padded, _max_query_len(padded), self._shape.max_model_len, slot_mapping)

    def _metadata(
        self, rows: BatchDescriptor, max_query_len: int, max_seq_len: int, slot_mapping: torch.Tensor
    ) -> PagedMetadata:
        num_reqs = _num_reqs(rows)
        return PagedMetadata(
            num_tokens=rows.num_tokens,
            num_reqs=num_reqs,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start=self._query_start.device[: num_reqs + 1],
            seq_lens=self._seq_lens.publish(num_reqs),
            block_table=self._block_table[:num_reqs],
            slot_mapping=slot_mapping,
        )


class PagedAttentionBackend(AttentionBackend):
    """A backend that learns of a step what `PagedMetadata` says and nothing else. It serves one batch."""

    _builder: PagedMetadataBuilder | None = None

    def bind(self, batch: InputBatch) -> None:
        """See `AttentionBackend.bind`."""
        self._builder_for(batch)

    def build(
        self, batch: InputBatch, step: StepInputs, *, padded: BatchDescriptor | None = None
    ) -> PagedMetadata:
        """See `AttentionBackend.build`."""
        return self._builder_for(batch).build(batch, step, padded)

    def build_for_capture(self, batch: InputBatch, padded: BatchDescriptor) -> PagedMetadata:
        """See `AttentionBackend.build_for_capture`."""
        return self._builder_for(batch).build_for_capture(batch, padded)

    def _builder_for(self, batch: InputBatch) -> PagedMetadataBuilder:
        if self._builder is None:
            self._builder = PagedMetadataBuilder(batch.shape, batch.link)
        return self._builder


def _num_reqs(rows: BatchDescriptor) -> int:
    assert rows.num_reqs is not None, "the shape of a PIECEWISE graph is none for attention"
    return rows.num_reqs


def _max_query_len(padded: BatchDescriptor) -> int:
    """The longest query that the graph must be able to take."""
    return padded.num_tokens // _num_reqs(padded) if padded.uniform else padded.num_tokens
