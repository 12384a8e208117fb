"""Runs one step: patch the batch, lay it out, forward, sample."""

from __future__ import annotations

import torch

from streamserve.engine.step import EMPTY, StepDiff, StepResult
from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.batch import InputBatch, StepInputs
from streamserve.worker.models.llama import LlamaModel
from streamserve.worker.sampler import Sampler


class ModelRunner:
    """A model with its persistent batch, cache and sampler.

    Args:
        model: parameters loaded.
        batch: mirror of the scheduler's slots.
        attention: bound to the KV cache.
        sampler: reads the batch's sampling columns.
    """

    def __init__(
        self, model: LlamaModel, batch: InputBatch, attention: AttentionBackend, sampler: Sampler
    ) -> None:
        self._model = model
        self._batch = batch
        self._attention = attention
        self._sampler = sampler

    def run(self, diff: StepDiff) -> StepResult:
        """Applies `diff` and runs its step. Hot: once a step."""
        with torch.inference_mode():
            self._batch.apply(diff)
            step = self._batch.prepare()
            if step.num_tokens == 0:
                return StepResult(diff.step, EMPTY, EMPTY)
            hidden = self._forward(step)
            token_ids = self._sample(step, hidden)
            self._batch.commit(step, token_ids)
            if token_ids is None:
                return StepResult(diff.step, EMPTY, EMPTY)
            return StepResult(diff.step, step.sample_slots, token_ids.cpu().numpy())

    def _forward(self, step: StepInputs) -> torch.Tensor:
        metadata = self._attention.build(self._batch, step)
        return self._model.forward(step.token_ids, step.positions, self._attention, metadata)

    def _sample(self, step: StepInputs, hidden: torch.Tensor) -> torch.Tensor | None:
        """int32[k], or None when no request has run all its known tokens."""
        if len(step.sample_slots) == 0:
            return None
        rows = hidden if step.sample_rows is None else hidden.index_select(0, step.sample_rows)
        return self._sampler.sample(self._model.logits(rows), step.sample_slots, step.sample_positions)
