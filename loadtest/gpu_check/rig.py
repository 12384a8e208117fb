"""A model with its batch, cache, graphs and sampler, put together so that each part can be looked at."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from loadtest.gpu_check.setting import Setting
from streamserve.engine.step import Join, StepDiff, StepResult
from streamserve.sampling import SamplingParams
from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.attention.select import choose_attention_backend, find_attention_facts
from streamserve.worker.attention.torch_padded import TorchPaddedAttention
from streamserve.worker.attention.variant import AttentionVariant
from streamserve.worker.batch import BatchShape, InputBatch
from streamserve.worker.device import resolve_dtype
from streamserve.worker.graphs.build import graph_devices
from streamserve.worker.graphs.dispatcher import GraphDispatcher
from streamserve.worker.graphs.mode import CUDAGraphMode, lower
from streamserve.worker.graphs.runner import GraphRunner
from streamserve.worker.kv_cache import KVCache, allocate
from streamserve.worker.link import open_link
from streamserve.worker.loader import load_weights
from streamserve.worker.models.config import DecoderConfig, read_decoder_config
from streamserve.worker.models.llama import LlamaModel
from streamserve.worker.models.model import Model
from streamserve.worker.models.registry import build_model
from streamserve.worker.runner import LaunchedStep, ModelRunner
from streamserve.worker.sampler import Sampler
from streamserve.worker.sampling_columns import SamplingColumns


def load_model(folder: Path, dtype: str, device: torch.device) -> tuple[DecoderConfig, LlamaModel]:
    """A model with made-up weights."""
    config = read_decoder_config(folder)
    model = build_model(config, resolve_dtype(dtype, device), device)
    load_weights("dummy", folder, 0, model.destinations(), lambda share: None)
    return config, model


class Rig:
    """A `ModelRunner` and what it is made of.

    Attributes:
        batch, graphs, runner, attention: its parts; `graphs` is None in mode NONE.
        cache_config: of the model.

    Args:
        setting: says where.
        config, model: from `load_model`; the model may be one that stands in for it.
        cache: from `allocate_cache`; no two rigs may be in use at a time on one.
        shape: bounds of every step.
        mode: of the graphs; lowered as a worker does.
        sizes: of the graphs, all of which are captured.
        forbids_sync: see `open_link`.
        checks: see `GraphRunner`.
    """

    def __init__(
        self,
        setting: Setting,
        config: DecoderConfig,
        model: Model,
        cache: KVCache,
        *,
        shape: BatchShape,
        mode: CUDAGraphMode,
        sizes: Iterable[int],
        forbids_sync: bool = False,
        checks: bool = False,
    ) -> None:
        device = torch.device(setting.device)
        self.model, self.config = model, config
        self.attention = _attention(setting, config, cache, shape)
        columns = SamplingColumns(shape.max_num_seqs, config.vocab_size, config.eos_token_ids)
        self.batch = InputBatch(shape, columns, device, open_link(device, forbids_sync=forbids_sync))
        sampler = Sampler(columns, self.batch.tokens, config.vocab_size, device)
        self.mode = lower(mode, self.attention.graph_support)
        self.graphs: GraphRunner | None = None
        # The runner binds the backend to the batch, which a capture needs.
        self.attention.bind(self.batch)
        if self.mode is not CUDAGraphMode.NONE:
            self.graphs = GraphRunner(
                model,
                self.batch,
                self.attention,
                GraphDispatcher(self.mode, sizes, shape.max_num_seqs),
                graph_devices(device)(),
                checks=checks,
            )
        self.runner = ModelRunner(model, self.batch, self.attention, sampler, graphs=self.graphs)
        while self.graphs is not None and self.graphs.num_waiting:
            self.graphs.capture_next()
        self._number = 0

    def execute(self, diff: StepDiff) -> StepResult:
        """Runs a step and waits for it."""
        return self.runner.run(diff)

    def join(self, num_requests: int, context: int, last: int, params: SamplingParams | None = None) -> None:
        """Requests that have read all but the last of their `context` known tokens; they begin to decode.

        What is in their blocks is whatever is in the cache; they take the first slots and blocks.

        Args:
            num_requests: how many.
            context: tokens of each.
            last: tokens that each has room for.
            params: of each; None is greedy.
        """
        per_request = -(-last // self.batch.shape.block_size)
        rng = np.random.default_rng(0)
        params = params or SamplingParams(max_tokens=last, temperature=0.0, ignore_eos=True)
        joins = [
            Join(
                slot=slot,
                tokens=rng.integers(3, self.config.vocab_size, context, dtype=np.int32),
                num_prompt=context,
                num_computed=context - 1,
                blocks=np.arange(slot * per_request, (slot + 1) * per_request, dtype=np.int32),
                params=params,
            )
            for slot in range(num_requests)
        ]
        none = np.zeros(0, dtype=np.int32)
        self.runner.run(StepDiff(self._next(), joins=joins, slots=none, num_tokens=none))

    def decode(self, num_requests: int) -> LaunchedStep:
        """Launches a step in which the first requests decode a token each."""
        slots = np.arange(num_requests, dtype=np.int32)
        return self.runner.launch(StepDiff(self._next(), slots=slots, num_tokens=np.ones_like(slots)))

    def decode_on(self) -> LaunchedStep:
        """Launches one more step of the same requests."""
        return self.runner.launch(StepDiff(self._next()))

    def _next(self) -> int:
        self._number += 1
        return self._number


def allocate_cache(
    config: DecoderConfig, num_blocks: int, block_size: int, dtype: str, device: torch.device
) -> KVCache:
    """A cache full of numbers like those that a model would put there."""
    cache = allocate(config, num_blocks, block_size, resolve_dtype(dtype, device), device)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return cache


def _attention(
    setting: Setting, config: DecoderConfig, cache: KVCache, shape: BatchShape
) -> AttentionBackend:
    keys = cache.keys[0]
    if setting.is_rehearsal:
        # Emulated graphs hold only this one.
        return TorchPaddedAttention(cache)
    facts = find_attention_facts(keys.device, keys.dtype, config.head_dim, shape.block_size)
    return choose_attention_backend("auto", facts).create(cache, shape, AttentionVariant(config.num_heads))
