"""The worker: one model, its KV cache and its persistent batch, behind start, execute and close."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from streamserve.engine.step import StepDiff, StepResult
from streamserve.errors import ConfigError
from streamserve.worker.attention.select import (
    AttentionChoice,
    choose_attention_backend,
    find_attention_facts,
)
from streamserve.worker.attention.torch_padded import TorchPaddedAttention
from streamserve.worker.attention.variant import AttentionVariant
from streamserve.worker.batch import BatchShape, InputBatch
from streamserve.worker.compile import check_compile, compile_model
from streamserve.worker.device import dtype_name, free_bytes, resolve_device, resolve_dtype
from streamserve.worker.graphs.build import build_graphs, graph_devices, requested_mode
from streamserve.worker.graphs.lazy import LazyCapture
from streamserve.worker.graphs.mode import RuntimeMode
from streamserve.worker.graphs.runner import GraphCounters, GraphRunner
from streamserve.worker.host_cores import usable_cores
from streamserve.worker.inductor import Compilation
from streamserve.worker.kv_cache import allocate, block_bytes, choose_num_blocks
from streamserve.worker.link import open_link
from streamserve.worker.loader import load_weights
from streamserve.worker.memory_profile import MemoryProfile
from streamserve.worker.models.config import DecoderConfig, read_decoder_config
from streamserve.worker.models.llama import LlamaModel
from streamserve.worker.models.model import Model
from streamserve.worker.models.operations import NativeOperations
from streamserve.worker.models.registry import build_model
from streamserve.worker.native.operators import native_operators
from streamserve.worker.numbers import graph_numbers, link_numbers, memory_numbers
from streamserve.worker.runner import LaunchedStep, ModelRunner
from streamserve.worker.sampler import Sampler
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.sizing import begin_profile, compiles_kernels, measure, warm_up
from streamserve.worker.spec import MemoryAccount, WorkerFacts, WorkerSpec

Progress = Callable[[str, float], None]

logger = logging.getLogger(__name__)

# A layer with fewer weights is done before a second thread has woken up.
_LEAST_SHARED_WEIGHTS = 1 << 20
# More threads than that a core are a slip of the keyboard, and OpenMP ends the process when it cannot have
# them.
_MOST_THREADS_PER_CORE = 8


class Worker:
    """Everything that touches tensors. Use: start, execute any number of times, close.

    Args:
        spec: what to run and how.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._runner: ModelRunner | None = None
        self._account: MemoryAccount | None = None
        self._compilations: Sequence[Compilation] = ()

    def start(self, progress: Progress) -> WorkerFacts:
        """Loads the weights, sizes and allocates the KV cache.

        Args:
            progress: called with what is going on and its share done, from 0 to 1.

        Raises:
            ConfigError: the folder, the architecture, the memory or an option does not fit; the message
                says what would.
        """
        spec = self._spec
        device = resolve_device(spec.device)
        dtype = resolve_dtype(spec.dtype, device)
        config = read_decoder_config(Path(spec.model_path))
        _set_threads(spec, config, device)
        max_model_len = _max_model_len(spec, config)
        progress("choosing kernels", 0.0)
        choice = _choose_attention(spec, config, dtype, device)
        is_sized = spec.kv_cache_memory is not None or spec.num_blocks_override is not None
        profile = None if is_sized else begin_profile(device, spec.gpu_memory_utilization)
        model, weights_bytes = self._compiled(config, dtype, device, progress)
        if choice.name == "cpu" and isinstance(model, LlamaModel):
            model.use(NativeOperations(native_operators()))
        if profile is not None:
            profile.weights_loaded()
        columns, batch = self._batch(config, max_model_len, device)
        sampler = Sampler(columns, batch.tokens, config.vocab_size, device)
        new_graph_device = graph_devices(device)

        def make_runner(num_blocks: int) -> ModelRunner:
            cache = allocate(config, num_blocks, spec.block_size, dtype, device)
            attention = choice.create(cache, batch.shape, AttentionVariant(config.num_heads))
            graphs = build_graphs(spec, model, batch, attention, new_graph_device)
            return ModelRunner(model, batch, attention, sampler, graphs=graphs)

        bytes_per_block = block_bytes(config, spec.block_size, dtype)
        account = _try_out(profile, make_runner, batch, bytes_per_block, progress)
        progress("allocating the KV cache", 0.0)
        profiled_bytes = None if account is None else account.cache
        num_blocks = choose_num_blocks(spec, max_model_len, bytes_per_block, device, profiled_bytes)
        runner = make_runner(num_blocks)
        progress("allocating the KV cache", 1.0)
        if runner.graphs is not None and spec.lazy_graphs:
            runner.lazy = LazyCapture(runner.graphs)
        elif runner.graphs is not None:
            _capture_all(runner.graphs, progress)
        self._runner, self._account = runner, account
        return WorkerFacts(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            dtype=dtype_name(dtype),
            device=device.type,
            kv_block_bytes=bytes_per_block,
            weights_bytes=weights_bytes,
            memory=account,
        )

    def execute(self, diff: StepDiff) -> StepResult:
        """Runs one step and waits for it. Only between `start` and `close`."""
        return self.launch(diff).result()

    def launch(self, diff: StepDiff) -> LaunchedStep:
        """Has the device run one step behind those before. Only between `start` and `close`.

        On a CPU it has run when this returns.
        """
        assert self._runner is not None, "execute before start or after close"
        return self._runner.launch(diff)

    def work_ahead(self) -> bool:
        """Captures a graph while nothing is to be run; False if all are there. Only after `start`."""
        assert self._runner is not None, "asked before start or after close"
        return self._runner.lazy is not None and self._runner.lazy.advance_idle()

    def statistics(self) -> dict[str, int]:
        """The worker's part of a STATS frame (streamserve.messages). Only between `start` and `close`."""
        assert self._runner is not None, "asked before start or after close"
        numbers = link_numbers(self._runner.link)
        if self._runner.graphs is not None:
            numbers |= graph_numbers(self._runner.graphs)
        return numbers if self._account is None else numbers | memory_numbers(self._account)

    def graph_counters(self) -> GraphCounters | None:
        """What steps ran from graphs; None if none do. Only between `start` and `close`."""
        assert self._runner is not None, "asked before start or after close"
        return None if self._runner.graphs is None else self._runner.graphs.counters

    def compilations(self) -> Sequence[Compilation]:
        """What was compiled, so far; nothing without --compile or where that failed."""
        return self._compilations

    def close(self) -> None:
        """Gives the memory of weights and cache back. May be called twice."""
        self._runner = None

    def _compiled(
        self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> tuple[Model, int]:
        """The model, compiled if that is asked for, and the bytes of its parameters."""
        check_compile(self._spec, dtype, device)
        loaded, weights_bytes = self._load(config, dtype, device, progress)
        compiled = compile_model(self._spec, loaded, progress)
        self._compilations = compiled.compilations
        return compiled.model, weights_bytes

    def _load(
        self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> tuple[LlamaModel, int]:
        """The model and the bytes of its parameters."""
        spec = self._spec
        progress("loading weights", 0.0)
        no_room = f"{spec.model_path}: the weights do not fit into the free memory of the {device.type}"
        free = free_bytes(device)
        try:
            model = build_model(config, dtype, device)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(f"{no_room}; take a smaller model") from error
        is_packed = spec.compile == "none"
        weights_bytes = model.num_bytes(packed=is_packed)
        if weights_bytes > free:
            raise ConfigError(f"{no_room} ({weights_bytes} bytes, {free} free); take a smaller model")
        destinations = model.destinations()
        load_weights(
            spec.load_format,
            Path(spec.model_path),
            spec.seed,
            destinations,
            lambda share: progress("loading weights", share),
        )
        # Views that would keep each matrix beside its packed form until all are packed.
        del destinations
        if is_packed:
            try:
                model.pack()
            except (MemoryError, RuntimeError) as error:
                raise ConfigError(f"{no_room}; take a smaller model") from error
        return model, weights_bytes

    def _batch(
        self, config: DecoderConfig, max_model_len: int, device: torch.device
    ) -> tuple[SamplingColumns, InputBatch]:
        spec = self._spec
        try:
            columns = SamplingColumns(spec.max_num_seqs, config.vocab_size, config.eos_token_ids)
            shape = BatchShape(spec.max_num_seqs, spec.max_num_batched_tokens, max_model_len, spec.block_size)
            link = open_link(device, forbids_sync=spec.debug_no_sync)
            return columns, InputBatch(shape, columns, device, link)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"no memory for {spec.max_num_seqs} requests of {max_model_len} tokens; "
                "lower --max-num-seqs or --max-model-len"
            ) from error


def _choose_attention(
    spec: WorkerSpec, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> AttentionChoice:
    """The backend that is asked for, else the fastest that works; emulated graphs hold only one of them."""
    wants_full = requested_mode(spec, device).decode is RuntimeMode.FULL
    if spec.attention_backend == "auto" and device.type == "cpu" and wants_full:
        reason = "attention backend: padded torch, since graphs are emulated"
        choice = AttentionChoice(
            "torch", "padded torch", reason, lambda cache, *_: TorchPaddedAttention(cache)
        )
    else:
        facts = find_attention_facts(device, dtype, config.head_dim, spec.block_size, spec.attention_backend)
        choice = choose_attention_backend(spec.attention_backend, facts)
        if choice.label == "Triton" and device.type == "cpu" and wants_full:
            raise ConfigError(
                "--attention-backend triton: an emulated FULL graph holds operations of torch, not kernels "
                "in Triton's interpreter, and would be replayed without attention; use --cudagraph-mode "
                "PIECEWISE or NONE, or --attention-backend auto"
            )
    logger.info(choice.reason)
    return choice


def _try_out(
    profile: MemoryProfile | None,
    make_runner: Callable[[int], ModelRunner],
    batch: InputBatch,
    bytes_per_block: int,
    progress: Progress,
) -> MemoryAccount | None:
    """Runs what requests will run, where that tells or does something; what it takes, if that is asked."""
    if profile is not None:
        progress("measuring memory", 0.0)
        return measure(profile, make_runner, batch.shape, bytes_per_block)
    if compiles_kernels(batch.link.device):
        progress("compiling kernels", 0.0)
        warm_up(make_runner, batch.shape)
    return None


def _capture_all(graphs: GraphRunner, progress: Progress) -> None:
    """Captures every graph, or as many as the memory holds."""
    count = graphs.num_waiting
    while graphs.num_waiting:
        progress("capturing graphs", (count - graphs.num_waiting) / count)
        try:
            graphs.capture_next()
        except torch.OutOfMemoryError:
            logger.warning(
                "no memory for %d of %d graphs; their steps run eagerly", graphs.num_waiting + 1, count
            )
            graphs.give_up()
    progress("capturing graphs", 1.0)


def _set_threads(spec: WorkerSpec, config: DecoderConfig, device: torch.device) -> None:
    if spec.cpu_threads:
        torch.set_num_threads(_checked_threads(spec.cpu_threads))
    elif device.type == "cpu" and _layer_weights(config) < _LEAST_SHARED_WEIGHTS:
        torch.set_num_threads(1)
    elif device.type == "cpu" and (cores := usable_cores()) < torch.get_num_threads():
        # Torch asks which cores it may run on, and not how much of their time a container is granted.
        logger.info("threads of the model: %d, as many as cores are granted", cores)
        torch.set_num_threads(cores)


def _layer_weights(config: DecoderConfig) -> int:
    """Numbers in the matrices of a decoder layer."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.hidden_size * (attention + 3 * config.intermediate_size)


def _checked_threads(num_threads: int) -> int:
    most = _MOST_THREADS_PER_CORE * (os.cpu_count() or 1)
    if num_threads > most:
        raise ConfigError(f"--cpu-threads {num_threads}: at most {most} on this machine; 0 is one a core")
    return num_threads


def _max_model_len(spec: WorkerSpec, config: DecoderConfig) -> int:
    if spec.max_model_len is None:
        return config.max_position
    if spec.max_model_len > config.max_position:
        raise ConfigError(
            f"--max-model-len {spec.max_model_len}: the model takes at most {config.max_position} tokens"
        )
    return spec.max_model_len
