"""Runs one step: patch the batch, lay it out, forward, sample. What came of it is read later."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streamserve.engine.step import EMPTY, StepDiff, StepResult
from streamserve.messages import Logprobs
from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.batch import InputBatch, StepInputs
from streamserve.worker.graphs.lazy import LazyCapture
from streamserve.worker.graphs.runner import GraphRunner
from streamserve.worker.link import Fetched
from streamserve.worker.logprobs import DeviceLogprobs, read_prompt_logprobs, split_by_span
from streamserve.worker.models.model import Model
from streamserve.worker.sampler import Sampled, Sampler


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device has been asked for, and perhaps not done yet.

    Attributes:
        number: of the step.
        inputs: what it ran; the tensors in it are the next step's by now.
        sampled: on the device; None if nobody sampled.
        fetched: what `sampled` and the log probabilities of prompts come to on the host, in that order.
    """

    number: int
    inputs: StepInputs
    sampled: Sampled | None
    fetched: Fetched

    def result(self) -> StepResult:
        """Waits for the step."""
        arrays = iter(self.fetched.wait())
        slots, token_ids, logprobs = EMPTY, EMPTY, None
        if self.sampled is not None:
            slots, token_ids = self.inputs.sample_slots, next(arrays)
            report = self.sampled.report
            if report is not None:
                logprobs = report.among_all(Logprobs(next(arrays), next(arrays), next(arrays)))
        spans = self.inputs.prompt_spans
        if not spans:
            return StepResult(self.number, slots, token_ids, logprobs)
        of_prompts = split_by_span(Logprobs(next(arrays), next(arrays), next(arrays)), spans)
        return StepResult(self.number, slots, token_ids, logprobs, of_prompts)


class ModelRunner:
    """A model with its persistent batch, cache and sampler.

    Attributes:
        graphs: as given.
        link: that of the batch.
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
        model: Model,
        batch: InputBatch,
        attention: AttentionBackend,
        sampler: Sampler,
        *,
        graphs: GraphRunner | None = None,
    ) -> None:
        attention.bind(batch)
        self.link = batch.link
        self._model = model
        self._batch = batch
        self._attention = attention
        self._sampler = sampler
        self.graphs = graphs
        self.lazy: LazyCapture | None = None

    def run(self, diff: StepDiff) -> StepResult:
        """Applies `diff`, runs its step and waits for it."""
        return self.launch(diff).result()

    def launch(self, diff: StepDiff) -> LaunchedStep:
        """Applies `diff` and asks the device for its step, behind all those before. Hot: once a step.

        The tokens that it samples are in the token pool before the next step reads them, whether the host
        has seen them or not. Nothing here waits for the device, except where a graph is captured.
        """
        with torch.inference_mode():
            if self.lazy is not None:
                self.lazy.advance()
            with self.link.step():
                return self._launch(diff)

    def _launch(self, diff: StepDiff) -> LaunchedStep:
        batch, link = self._batch, self.link
        batch.apply(diff)
        step = batch.prepare()
        if step.num_tokens == 0:
            return LaunchedStep(diff.step, step, None, link.fetch(()))
        hidden = self._forward(step)
        of_prompts = self._prompt_logprobs(step, hidden).tensors() if step.prompt_spans else ()
        sampled = self._sample(step, hidden)
        batch.commit(step, None if sampled is None else sampled.token_ids)
        wanted: list[torch.Tensor] = []
        if sampled is not None:
            wanted.append(sampled.token_ids)
            if sampled.report is not None:
                wanted += sampled.report.read.tensors()
        return LaunchedStep(diff.step, step, sampled, link.fetch([*wanted, *of_prompts]))

    def _forward(self, step: StepInputs) -> torch.Tensor:
        if self.graphs is not None:
            return self.graphs.forward(step)
        metadata = self._attention.build(self._batch, step)
        self.link.forward_begins()
        return self._model.forward(step.token_ids, step.positions, self._attention, metadata)

    def _sample(self, step: StepInputs, hidden: torch.Tensor) -> Sampled | None:
        """A token for each request, or None when none has run all its known tokens."""
        if len(step.sample_slots) == 0:
            return None
        rows = hidden if step.sample_rows is None else hidden.index_select(0, step.sample_rows)
        return self._sampler.sample(self._model.logits(rows), step.sample_slots, step.sample_positions)

    def _prompt_logprobs(self, step: StepInputs, hidden: torch.Tensor) -> DeviceLogprobs:
        model = self._model
        return read_prompt_logprobs(
            step.prompt_spans, hidden, model.logits, self._batch.tokens, model.config.vocab_size
        )
