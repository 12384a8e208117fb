"""The persistent batch: the scheduler's slots as this worker holds them, patched and never rebuilt.

    tokens[slot, position]       every known token of every request; the forward gathers its input here and
                                 the sampler scatters its output here
    block_table[slot, index]     where the K and V of positions [index * block_size, ...) are kept
    num_known[slot]              known tokens
    num_computed[slot]           leading tokens whose K and V are in the cache

A step costs a dozen vector operations over its tokens. Python touches single requests only when they join or
when they run more than one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from streamserve.engine.step import EMPTY, Int32Array, Join, StepDiff
from streamserve.worker.link import DeviceLink, open_link
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.staging import StagedArray
from streamserve.worker.token_pool import Int64Array, TokenPool


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The sizes that bound every step.

    Attributes:
        max_num_seqs: slots.
        max_num_tokens: most tokens of one step.
        max_model_len: most tokens of one request.
        block_size: tokens in a KV cache block.
    """

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    block_size: int


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Rows of a step whose logits predict tokens of a prompt that wants to hear of it.

    Attributes:
        slot: whose prompt it is.
        first_row: the first of the rows in the flat arrays; the others follow.
        start: position of the token that it predicts; at least 1.
        count: rows, at least 1.
        num_top: how many of the likeliest tokens are wanted at each.
    """

    slot: int
    first_row: int
    start: int
    count: int
    num_top: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, laid out for the model: the tokens of all scheduled slots, one request after the other.

    Attributes:
        num_tokens: t, tokens of the step.
        slots: int32[r], the scheduled slots.
        query_lens: int32[r], tokens that each of them runs.
        query_offsets: int64[r + 1], where each one's tokens begin in the flat arrays (cu_seqlens).
        context_lens: int32[r], tokens each of them can attend to once this step's are in the cache.
        token_ids: int32[t] on the device.
        positions: int64[t] on the device.
        slot_mapping: int64[t] on the device, where in the cache each token's K and V go: block * block_size
            + offset.
        sample_slots: int32[k], the slots that sample a token.
        sample_positions: int32[k], where in the request that token will stand.
        sample_rows: int64[k] on the device, rows of the flat arrays that need logits; None is every row.
        prompt_spans: further rows that need logits, for log probabilities of prompts.
    """

    num_tokens: int
    slots: Int32Array
    query_lens: Int32Array
    query_offsets: Int64Array
    context_lens: Int32Array
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    sample_slots: Int32Array
    sample_positions: Int32Array
    sample_rows: torch.Tensor | None
    prompt_spans: Sequence[PromptSpan] = ()


class StepRows(NamedTuple):
    """Persistent device memory of a step's rows; see `StepInputs`."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Layout:
    """What follows from the scheduled slots and lengths alone; kept while they stay the same.

    Attributes:
        slots, query_lens, query_offsets: as in `StepInputs`.
        token_slots: int32[t], the slot of each flat token.
        within: int64[t], its index among the tokens that its slot runs in this step.
        pool_base, table_base: int64[t], flat index of its slot's row in the token pool and in block_table.
    """

    slots: Int32Array
    query_lens: Int32Array
    query_offsets: Int64Array
    token_slots: Int32Array
    within: Int64Array
    pool_base: Int64Array
    table_base: Int64Array


class _StepBuffers:
    """Device memory at fixed addresses that every step writes anew.

    Attributes:
        token_index: int64[t], where in the token pool each token of the step is.
        positions, slot_mapping, token_ids: as in `StepInputs`.
        sample_index: int64[s], where in the token pool each sampled token goes.
        sample_rows: as in `StepInputs`.
    """

    def __init__(self, max_seqs: int, max_tokens: int, link: DeviceLink) -> None:
        self.token_index = StagedArray(max_tokens, torch.int64, link)
        self.positions = StagedArray(max_tokens, torch.int64, link)
        self.slot_mapping = StagedArray(max_tokens, torch.int64, link)
        self.token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=link.device)
        self.sample_index = StagedArray(max_seqs, torch.int64, link)
        self.sample_rows = StagedArray(max_seqs, torch.int64, link)


class InputBatch:
    """Mirror of the scheduler's slots.

    Attributes:
        link: the way to the device, for all that a step sends there.

    Args:
        shape: bounds of every step.
        columns: the slots' sampling settings; joins are written there too.
        device: where the model runs.
        link: the way there; None opens one.
    """

    def __init__(
        self,
        shape: BatchShape,
        columns: SamplingColumns,
        device: torch.device,
        link: DeviceLink | None = None,
    ) -> None:
        self.link = link = link or open_link(device)
        self.shape = shape
        self.columns = columns
        seqs = shape.max_num_seqs
        # One more than may be computed: the last token of a full request is sampled but never run.
        self.tokens = TokenPool(seqs, shape.max_model_len + 1, device, link)
        self.block_table = np.zeros((seqs, -(-shape.max_model_len // shape.block_size)), dtype=np.int32)
        self.num_blocks = np.zeros(seqs, dtype=np.int32)
        # Leading blocks of each slot that a copy of block_table on the device already has. Whoever keeps such
        # a copy counts up; a join starts anew.
        self.num_mirrored = np.zeros(seqs, dtype=np.int32)
        self.num_known = np.zeros(seqs, dtype=np.int32)
        self.num_computed = np.zeros(seqs, dtype=np.int32)
        self._buffers = _StepBuffers(seqs, max(shape.max_num_tokens, seqs), link)
        self._layout = self._lay_out(EMPTY, EMPTY)
        # slot → (num_prompt, num_top) of prompts whose log probabilities are wanted and not all computed.
        self._reporting: dict[int, tuple[int, int]] = {}

    def known_tokens(self, slot: int) -> Int32Array:
        """A copy of all known tokens in `slot`, int32[num_known]."""
        return self.tokens.read(slot, int(self.num_known[slot]))

    def apply(self, diff: StepDiff) -> None:
        """Patches the rows that `diff` names. Hot: once a step."""
        if len(diff.leaves):
            self.num_known[diff.leaves] = 0
            self.num_computed[diff.leaves] = 0
            self.num_blocks[diff.leaves] = 0
            for slot in diff.leaves.tolist() if self._reporting else ():
                self._reporting.pop(slot, None)
        for join in diff.joins:
            self._join(join)
        if len(diff.append_slots):
            self._append_blocks(diff.append_slots, diff.append_blocks)
        if diff.slots is not None and diff.num_tokens is not None:
            self._layout = self._lay_out(diff.slots, diff.num_tokens)

    def prepare(self) -> StepInputs:
        """Lays the step out for the model. Hot: once a step; the tensors are overwritten by the next one."""
        layout, buffers, block_size = self._layout, self._buffers, self.shape.block_size
        count = len(layout.token_slots)
        positions = buffers.positions.host[:count]
        np.add(self.num_computed[layout.token_slots], layout.within, out=positions)
        np.add(layout.pool_base, positions, out=buffers.token_index.host[:count])
        block_index = positions // block_size
        slot_mapping = buffers.slot_mapping.host[:count]
        np.multiply(self.block_table.ravel()[layout.table_base + block_index], block_size, out=slot_mapping)
        slot_mapping += positions
        block_index *= block_size
        slot_mapping -= block_index

        token_ids = buffers.token_ids[:count]
        torch.index_select(self.tokens.flat, 0, buffers.token_index.publish(count), out=token_ids)
        context_lens = self.num_computed[layout.slots] + layout.query_lens
        sample_slots, sample_positions, sample_rows = self._sampling_rows(layout, context_lens)
        return StepInputs(
            num_tokens=count,
            slots=layout.slots,
            query_lens=layout.query_lens,
            query_offsets=layout.query_offsets,
            context_lens=context_lens,
            token_ids=token_ids,
            positions=buffers.positions.publish(count),
            slot_mapping=buffers.slot_mapping.publish(count),
            sample_slots=sample_slots,
            sample_positions=sample_positions,
            sample_rows=sample_rows,
            prompt_spans=self._prompt_spans(layout) if self._reporting else (),
        )

    def rows(self, count: int) -> StepRows:
        """The first `count` rows of the buffers that every step is laid out in.

        Rows behind those of the step hold what earlier steps left there.
        """
        buffers = self._buffers
        return StepRows(
            buffers.token_ids[:count], buffers.positions.device[:count], buffers.slot_mapping.device[:count]
        )

    def commit(self, step: StepInputs, token_ids: torch.Tensor | None) -> None:
        """Advances the slots of `step` and appends what they sampled. Hot: once a step.

        Args:
            step: as `prepare` returned it.
            token_ids: int32[k] on the device, one for each of `step.sample_slots`; None when k is 0.
        """
        self.num_computed[step.slots] = step.context_lens
        if token_ids is None:
            return
        count = len(step.sample_slots)
        index = self._buffers.sample_index.host[:count]
        np.multiply(step.sample_slots, self.tokens.width, out=index, dtype=np.int64)
        index += step.sample_positions
        self.tokens.flat.index_copy_(0, self._buffers.sample_index.publish(count), token_ids)
        self.num_known[step.sample_slots] = step.sample_positions + 1

    def _sampling_rows(
        self, layout: _Layout, context_lens: Int32Array
    ) -> tuple[Int32Array, Int32Array, torch.Tensor | None]:
        """Which slots sample, at which position, from which rows: those whose known tokens all have run."""
        samples = context_lens == self.num_known[layout.slots]
        if samples.all():
            slots, positions = layout.slots, context_lens
            if len(slots) == len(layout.token_slots):
                return slots, positions, None
            last_rows = layout.query_offsets[1:] - 1
        else:
            slots, positions = layout.slots[samples], context_lens[samples]
            last_rows = layout.query_offsets[1:][samples] - 1
        self._buffers.sample_rows.host[: len(slots)] = last_rows
        return slots, positions, self._buffers.sample_rows.publish(len(slots))

    def _prompt_spans(self, layout: _Layout) -> list[PromptSpan]:
        """What this step can tell of the prompts that want to know; those it completes are forgotten."""
        spans = []
        for slot, (num_prompt, num_top) in list(self._reporting.items()):
            for index in np.flatnonzero(layout.slots == slot).tolist():
                start = int(self.num_computed[slot]) + 1
                end = start + int(layout.query_lens[index])
                if end >= num_prompt:
                    del self._reporting[slot]
                count = min(end, num_prompt) - start
                if count > 0:
                    first_row = int(layout.query_offsets[index])
                    spans.append(PromptSpan(slot, first_row, start, count, num_top))
        return spans

    def _join(self, join: Join) -> None:
        slot, count = join.slot, len(join.tokens)
        self.tokens.write(slot, join.tokens)
        self.num_known[slot] = count
        self.num_computed[slot] = join.num_computed
        self.num_blocks[slot] = len(join.blocks)
        self.num_mirrored[slot] = 0
        self.block_table[slot, : len(join.blocks)] = join.blocks
        self.columns.put(slot, join.params, join.num_prompt)
        self._reporting.pop(slot, None)
        if join.params.prompt_logprobs is not None:
            self._reporting[slot] = (join.num_prompt, join.params.prompt_logprobs)

    def _append_blocks(self, slots: Int32Array, blocks: Int32Array) -> None:
        """Appends blocks[i] to the table of slots[i], in order where a slot comes more than once."""
        order = np.argsort(slots, kind="stable")
        sorted_slots = slots[order]
        index = np.arange(len(slots))
        starts_run = np.ones(len(slots), dtype=bool)
        starts_run[1:] = sorted_slots[1:] != sorted_slots[:-1]
        within_run = index - np.maximum.accumulate(np.where(starts_run, index, 0))
        self.block_table[sorted_slots, self.num_blocks[sorted_slots] + within_run] = blocks[order]
        np.add.at(self.num_blocks, slots, 1)

    def _lay_out(self, slots: Int32Array, query_lens: Int32Array) -> _Layout:
        """Copies what it keeps: the scheduler may write its arrays again."""
        offsets = np.zeros(len(slots) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=offsets[1:])
        token_slots = np.repeat(slots, query_lens)
        base = token_slots.astype(np.int64)
        return _Layout(
            slots=slots.copy(),
            query_lens=query_lens.copy(),
            query_offsets=offsets,
            token_slots=token_slots,
            within=np.arange(len(token_slots)) - np.repeat(offsets[:-1], query_lens),
            pool_base=base * self.tokens.width,
            table_base=base * self.block_table.shape[1],
        )
