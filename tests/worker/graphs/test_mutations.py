"""What goes wrong on a GPU goes wrong here: each of these mistakes, made on purpose, is caught.

Those that are right without graphs, which is what makes them dangerous, are shown to be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_rig import Rig, Trace, play

from streamserve.worker.attention.metadata import PagedMetadata, PagedMetadataBuilder
from streamserve.worker.attention.torch_padded import TorchPaddedAttention
from streamserve.worker.batch import InputBatch, StepInputs
from streamserve.worker.graphs.descriptor import BatchDescriptor
from streamserve.worker.graphs.dispatcher import Dispatch, GraphDispatcher
from streamserve.worker.graphs.graph import GraphError
from streamserve.worker.graphs.mode import CUDAGraphMode
from streamserve.worker.graphs.segments import BreakingAttention
from streamserve.worker.models.llama import ForwardBuffers

pytestmark = pytest.mark.torch

STEPS = 120
FULL, PIECEWISE, BOTH = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.fixture(scope="module")
def truth(tiny_model: Path) -> Trace:
    return play(Rig(tiny_model, CUDAGraphMode.NONE).execute, STEPS)


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces a method by a function that gets the original first."""

    def replace(owner: type, name: str, mutant: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: mutant(original, *args, **kwargs))

    return replace


def outcome(folder: Path, mode: CUDAGraphMode, **settings: Any) -> Trace:
    """What a day comes to."""
    return play(Rig(folder, mode, **settings).execute, STEPS)


def test_metadata_allocated_per_step(tiny_model: Path, truth: Trace, mutate: Callable[..., None]) -> None:
    def fresh(original: Callable[..., PagedMetadata], *args: Any) -> PagedMetadata:
        metadata = original(*args)
        values = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}
        return PagedMetadata(
            **{n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        )

    mutate(PagedMetadataBuilder, "_metadata", fresh)
    assert outcome(tiny_model, CUDAGraphMode.NONE) == truth
    assert outcome(tiny_model, PIECEWISE) == truth
    assert outcome(tiny_model, FULL) != truth
    with pytest.raises(GraphError, match="query_start, seq_lens, block_table, slot_mapping"):
        outcome(tiny_model, FULL, checks=True)


@pytest.mark.parametrize(
    "ask",
    [
        lambda lens: lens.max().item(),
        lambda lens: int(lens[0]),
        lambda lens: lens.tolist(),
        lambda lens: lens.numpy(),
        lambda lens: bool((lens > 3).any()),
        lambda lens: lens.nonzero(),
        lambda lens: torch.tensor([3]),
    ],
    ids=["item", "int", "tolist", "numpy", "bool", "nonzero", "torch.tensor"],
)
def test_a_forward_that_needs_the_host(
    tiny_model: Path, truth: Trace, mutate: Callable[..., None], ask: Callable[[torch.Tensor], Any]
) -> None:
    def asking(original: Callable[..., None], *args: Any, metadata: PagedMetadata, **kwargs: Any) -> None:
        ask(metadata.seq_lens)
        original(*args, metadata=metadata, **kwargs)

    mutate(TorchPaddedAttention, "forward", asking)
    assert outcome(tiny_model, PIECEWISE) == truth
    with pytest.raises(GraphError, match="aten::"):
        outcome(tiny_model, FULL)


def test_a_host_number_baked_in(tiny_model: Path, truth: Trace, mutate: Callable[..., None]) -> None:
    """The longest context of the step at capture instead of the longest there can be."""

    def short(original: Callable[..., Any], builder: Any, batch: InputBatch, padded: Any) -> PagedMetadata:
        return dataclasses.replace(original(builder, batch, padded), max_seq_len=32)

    mutate(PagedMetadataBuilder, "build_for_capture", short)
    assert outcome(tiny_model, FULL) != truth
    with pytest.raises(GraphError, match="max_seq_len"):
        outcome(tiny_model, FULL, checks=True)


@pytest.mark.parametrize("mode", [FULL, BOTH])
def test_padding_that_writes_to_a_live_block(
    tiny_model: Path, truth: Trace, mutate: Callable[..., None], mode: CUDAGraphMode
) -> None:
    """The keys and values of the first request's last token but one."""

    def careless(
        original: Callable[..., PagedMetadata], builder: Any, batch: Any, step: StepInputs, padded: Any
    ) -> PagedMetadata:
        metadata = original(builder, batch, step, padded)
        metadata.slot_mapping[step.num_tokens :] = (metadata.slot_mapping[0] - 1).clamp(min=0)
        return metadata

    mutate(PagedMetadataBuilder, "_padded", careless)
    assert outcome(tiny_model, PIECEWISE) == truth
    assert outcome(tiny_model, mode) != truth
    assert outcome(tiny_model, mode, checks=True) != truth


def test_padding_that_is_left_out(tiny_model: Path, truth: Trace, mutate: Callable[..., None]) -> None:
    """Rows behind the step keep the slots that an earlier step gave them."""

    def stale(
        original: Callable[..., PagedMetadata], builder: Any, batch: InputBatch, step: StepInputs, padded: Any
    ) -> PagedMetadata:
        before = batch.rows(padded.num_tokens).slot_mapping[step.num_tokens :].clone()
        metadata = original(builder, batch, step, padded)
        metadata.slot_mapping[step.num_tokens :] = before
        return metadata

    mutate(PagedMetadataBuilder, "_padded", stale)
    assert outcome(tiny_model, FULL) != truth


def test_attention_that_returns_a_fresh_tensor(
    tiny_model: Path, truth: Trace, mutate: Callable[..., None]
) -> None:
    """It hands over memory of its own instead of writing into what it was given."""

    def fresh(
        original: Callable[..., None], backend: Any, q: Any, k: Any, v: Any, out: torch.Tensor, **kwargs: Any
    ) -> None:
        result = out.clone()
        original(backend, q, k, v, result, **kwargs)
        out.set_(result)

    mutate(TorchPaddedAttention, "forward", fresh)
    assert outcome(tiny_model, CUDAGraphMode.NONE) == truth
    assert outcome(tiny_model, PIECEWISE) != truth


def test_a_mixed_step_dispatched_to_a_graph_for_decodes(
    tiny_model: Path, truth: Trace, mutate: Callable[..., None]
) -> None:
    def all_alike(original: Callable[..., Dispatch], self: Any, batch: BatchDescriptor) -> Dispatch:
        return original(self, dataclasses.replace(batch, uniform=True))

    mutate(GraphDispatcher, "dispatch", all_alike)
    assert outcome(tiny_model, PIECEWISE) == truth
    assert outcome(tiny_model, FULL) == truth
    assert outcome(tiny_model, BOTH) != truth


def test_a_missing_break(tiny_model: Path, mutate: Callable[..., None]) -> None:
    def stubborn(original: Callable[..., None], *args: Any, layer: int, metadata: Any) -> None:
        if layer != 1:
            original(*args, layer=layer, metadata=metadata)

    mutate(BreakingAttention, "forward", stubborn)
    with pytest.raises(GraphError, match="1 breaks in a captured forward that should have 2"):
        outcome(tiny_model, PIECEWISE)


def test_a_break_of_the_wrong_layer(tiny_model: Path, mutate: Callable[..., None]) -> None:
    def stubborn(original: Callable[..., None], *args: Any, layer: int, metadata: Any) -> None:
        if layer != 0:
            original(*args, layer=layer, metadata=metadata)

    mutate(BreakingAttention, "forward", stubborn)
    with pytest.raises(GraphError, match=r"break 0 .* at layer 1"):
        outcome(tiny_model, PIECEWISE)


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_inputs_that_have_moved(tiny_model: Path, truth: Trace, mode: CUDAGraphMode) -> None:
    """A batch that lays a step out somewhere else than where its graph looks."""

    def outcome_with(checks: bool) -> Trace:
        rig = Rig(tiny_model, mode, checks=checks)
        assert rig.graphs is not None
        buffers = rig.graphs._batch._buffers
        buffers.token_ids = buffers.token_ids.clone()
        return play(rig.execute, STEPS)

    assert outcome_with(False) != truth
    with pytest.raises(GraphError, match="token_ids"):
        outcome_with(True)


@pytest.mark.parametrize("name", ["cos", "signed_sin"])
def test_a_tensor_of_the_pool_read_behind_a_break(
    tiny_model: Path, truth: Trace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What the forward computes once and every layer reads is left where it was allocated."""

    class Forgetful:
        """Keeps nothing: `copy_` gives back what it was given."""

        @staticmethod
        def copy_(tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    original = ForwardBuffers.rows

    def rows(self: ForwardBuffers, count: int) -> ForwardBuffers:
        return dataclasses.replace(original(self, count), **{name: Forgetful()})

    monkeypatch.setattr(ForwardBuffers, "rows", rows)
    assert outcome(tiny_model, FULL) == truth
    assert outcome(tiny_model, PIECEWISE) != truth


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_bridge_that_is_not_crossed(
    tiny_model: Path, truth: Trace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Attention gets what the last step left in the bridge."""

    def forward(self: Any, q: Any, k: Any, v: Any, out: Any, *, layer: int, metadata: Any) -> None:
        for part, tensor in {"q": q, "k": k, "v": v}.items():
            if part != name:
                getattr(self._bridge, part).copy_(tensor)
        self._recorder.break_at(layer)

    monkeypatch.setattr(BreakingAttention, "forward", forward)
    assert outcome(tiny_model, PIECEWISE) != truth
