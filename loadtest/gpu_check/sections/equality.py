"""The same trace eagerly and from graphs: the same tokens, and at the same sizes the same logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from loadtest.gpu_check.model_folder import write_config
from loadtest.gpu_check.results import Record
from loadtest.gpu_check.rig import Rig, allocate_cache, load_model
from loadtest.gpu_check.setting import Setting
from loadtest.gpu_check.trace import Trace, play
from streamserve.worker.attention.base import Attention
from streamserve.worker.batch import BatchShape
from streamserve.worker.graphs.mode import CUDAGraphMode, RuntimeMode
from streamserve.worker.models.config import DecoderConfig
from streamserve.worker.models.llama import ForwardBuffers, LlamaModel

SIZES = (1, 2, 4, 8, 16, 32)
SHAPE = BatchShape(max_num_seqs=8, max_num_tokens=48, max_model_len=256, block_size=16)
# So few that requests are preempted.
NUM_BLOCKS = 24
_LOGIT_STEPS = 20
_LOGIT_BLOCKS = 40
# Of the spread of logits: a bfloat16 has 8 bits, and products are added up in another order at most.
_LOGIT_TOLERANCE = 2**-5
_GRAPHS = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE)


def run(setting: Setting, record: Record, shared: dict[str, Any]) -> None:
    """See `SectionModule.run`."""
    folder = write_config(setting.folder / "models" / "small", setting.small)
    _check_tokens(setting, record, *load_model(folder, "float32", torch.device(setting.device)))
    _check_logits(setting, record, *load_model(folder, setting.dtype, torch.device(setting.device)))


def _check_tokens(setting: Setting, record: Record, config: DecoderConfig, model: LlamaModel) -> None:
    """In float32, whose rounding no choice of a kernel brings near to changing a token."""
    device = torch.device(setting.device)
    traces: dict[CUDAGraphMode, Trace] = {}
    for mode in (CUDAGraphMode.NONE, *_GRAPHS):
        cache = allocate_cache(config, NUM_BLOCKS, SHAPE.block_size, "float32", device)
        rig = Rig(setting, config, model, cache, shape=SHAPE, mode=mode, sizes=SIZES, checks=True)
        traces[mode] = play(rig.execute, SHAPE, NUM_BLOCKS, config.vocab_size, num_steps=setting.trace_steps)
        if rig.graphs is not None:
            counts = rig.graphs.counters.steps
            used = {kind for kind, count in counts.items() if count}
            wanted = {mode.decode, mode.mixed} - {RuntimeMode.NONE}
            record.check(f"{mode.name} runs from its graphs", used >= wanted, _words(counts))
    truth = traces[CUDAGraphMode.NONE]
    record.note(
        f"trace of {len(truth.steps)} steps: {len(truth.outputs)} requests, {truth.preempted} preempted, "
        f"{truth.cached} prompt tokens from the prefix cache"
    )
    record.check("the trace preempts and shares", truth.preempted > 0 and truth.cached > 0)
    total = sum(map(len, truth.outputs.values()))
    for mode in _GRAPHS:
        different = [
            request for request, tokens in truth.outputs.items() if traces[mode].outputs[request] != tokens
        ]
        detail = f"{total} tokens" if not different else f"requests {different[:8]} differ"
        record.check(f"{mode.name} gives the tokens of NONE", not different, detail)


def _check_logits(setting: Setting, record: Record, config: DecoderConfig, model: LlamaModel) -> None:
    """Steps of exactly the size of a graph, so that all modes multiply matrices of the same shapes."""
    device = torch.device(setting.device)
    table = record.table("Logits against NONE, same sizes", "requests", "mode", "largest difference / spread")
    for num_requests in (1, SHAPE.max_num_seqs):
        seen: dict[CUDAGraphMode, list[torch.Tensor]] = {}
        for mode in (CUDAGraphMode.NONE, *_GRAPHS):
            cache = allocate_cache(config, _LOGIT_BLOCKS, SHAPE.block_size, setting.dtype, device)
            # The same junk before every trace, since it is what requests attend to.
            for index, tensor in enumerate((*cache.keys, *cache.values)):
                tensor.copy_(_noise(tensor, index))
            tapped = _Tapped(model)
            rig = Rig(setting, config, tapped, cache, shape=SHAPE, mode=mode, sizes=SIZES, checks=True)
            rig.join(num_requests, 30, 30 + _LOGIT_STEPS)
            rig.decode(num_requests).result()
            for _ in range(_LOGIT_STEPS - 2):
                rig.decode_on().result()
            seen[mode] = tapped.seen
        for mode in _GRAPHS:
            worst = _worst(seen[CUDAGraphMode.NONE], seen[mode])
            record.row(table, num_requests, mode.name, worst)
            name = f"{mode.name} gives the logits of NONE, {num_requests} requests"
            record.check(name, worst <= _LOGIT_TOLERANCE, f"{worst:.2g} of {_LOGIT_TOLERANCE:.2g}")


def _noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


def _worst(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference while both go the same way: where a near tie falls otherwise, they part."""
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        difference = (one - other).abs().max() / one.std()
        worst = max(worst, float(np.nan_to_num(float(difference), nan=np.inf)))
        if not torch.equal(one.argmax(-1), other.argmax(-1)):
            break
    return worst


def _words(counts: dict[RuntimeMode, int]) -> str:
    return ", ".join(f"{count} {mode.name}" for mode, count in counts.items())


class _Tapped:
    """A model that keeps the logits it gave.

    Args:
        model: the real one.
    """

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self.seen: list[torch.Tensor] = []

    @property
    def config(self) -> DecoderConfig:
        """See `Model`."""
        return self._model.config

    @property
    def embedding(self) -> torch.Tensor:
        """See `Model`."""
        return self._model.embedding

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        metadata: Any,
        buffers: ForwardBuffers | None = None,
    ) -> torch.Tensor:
        """See `Model`."""
        return self._model.forward(token_ids, positions, attention, metadata, buffers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        logits = self._model.logits(hidden)
        self.seen.append(logits.clone())
        return logits
