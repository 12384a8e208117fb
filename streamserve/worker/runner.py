"""Runs one step: patch the batch, lay it out, forward, sample."""

from __future__ import annotations

import torch

from streamserve.engine.step import EMPTY, PromptLogprobs, StepDiff, StepResult
from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.batch import InputBatch, StepInputs
from streamserve.worker.graphs.lazy import LazyCapture
from streamserve.worker.graphs.runner import GraphRunner
from streamserve.worker.logprobs import read_prompt_logprobs
from streamserve.worker.models.llama import LlamaModel
from streamserve.worker.sampler import Sampled, Sampler


class ModelRunner:
    """A model with its persistent batch, cache and sampler.

    Attributes:
        graphs: as given.
        lazy: captures graphs between steps; None while nothing does.

    Args:
        model: parameters loaded.
        batch: mirror of the scheduler's slots.
        attention: bound to the KV cache.
        sampler: reads the batch's sampling columns.
        graphs: runs forwards from graphs; None runs them all eagerly.
    """

    def __init__(
        self,
        model: LlamaModel,
        batch: InputBatch,
        attention: AttentionBackend,
        sampler: Sampler,
        *,
        graphs: GraphRunner | None = None,
    ) -> None:
        self._model = model
        self._batch = batch
        self._attention = attention
        self._sampler = sampler
        self.graphs = graphs
        self.lazy: LazyCapture | None = None

    def run(self, diff: StepDiff) -> StepResult:
        """Applies `diff` and runs its step. Hot: once a step."""
        with torch.inference_mode():
            if self.lazy is not None:
                self.lazy.advance()
            self._batch.apply(diff)
            step = self._batch.prepare()
            if step.num_tokens == 0:
                return StepResult(diff.step, EMPTY, EMPTY)
            hidden = self._forward(step)
            prompt_logprobs = self._prompt_logprobs(step, hidden) if step.prompt_spans else ()
            sampled = self._sample(step, hidden)
            if sampled is None:
                self._batch.commit(step, None)
                return StepResult(diff.step, EMPTY, EMPTY, prompt_logprobs=prompt_logprobs)
            self._batch.commit(step, sampled.token_ids)
            token_ids = sampled.token_ids.cpu().numpy()
            return StepResult(diff.step, step.sample_slots, token_ids, sampled.logprobs, prompt_logprobs)

    def _forward(self, step: StepInputs) -> torch.Tensor:
        if self.graphs is not None:
            return self.graphs.forward(step)
        metadata = self._attention.build(self._batch, step)
        return self._model.forward(step.token_ids, step.positions, self._attention, metadata)

    def _sample(self, step: StepInputs, hidden: torch.Tensor) -> Sampled | None:
        """A token for each request, or None when none has run all its known tokens."""
        if len(step.sample_slots) == 0:
            return None
        rows = hidden if step.sample_rows is None else hidden.index_select(0, step.sample_rows)
        return self._sampler.sample(self._model.logits(rows), step.sample_slots, step.sample_positions)

    def _prompt_logprobs(self, step: StepInputs, hidden: torch.Tensor) -> list[PromptLogprobs]:
        model = self._model
        return read_prompt_logprobs(
            step.prompt_spans, hidden, model.logits, self._batch.tokens, model.config.vocab_size
        )
