"""What a worker is told at its start and what it reports back. Torch-free, so that anyone may import it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streamserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker needs to know.

    Attributes:
        model_path: local Hugging Face folder: config.json, generation_config.json, safetensors weights.
        load_format: `dummy` fills the weights with random numbers; anything else reads safetensors.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: float32 on a CPU, bfloat16 on CUDA.
        device: `cpu`, `cuda`, or `auto` for CUDA where there is one.
        seed: of the dummy weights.
        max_model_len: most tokens of one request; None is the model's own limit.
        max_num_seqs: slots of the persistent batch.
        max_num_batched_tokens: most tokens of one step.
        block_size: tokens in a KV cache block.
        kv_cache_memory: bytes for the KV cache; None works it out from the free memory.
        num_blocks_override: exact number of KV cache blocks, whatever the memory.
        cpu_threads: threads of the model on a CPU; 0 is one for a small model, else one a granted core.
        cudagraph_mode: name of a `CUDAGraphMode`; None is FULL_AND_PIECEWISE on CUDA and NONE elsewhere.
            Where there is no CUDA, graphs are emulated: good for proving things, and slow.
        cudagraph_capture_sizes: token counts that graphs are captured for; empty chooses.
        lazy_graphs: capture graphs between steps rather than before the first one.
        attention_backend: value of --attention-backend; see `attention.select`.
        gpu_memory_utilization: share of a GPU's memory that the worker may use; it sizes the KV cache unless
            one of the two options above does. Of no meaning on a CPU.
        debug_no_sync: make an error of what has the host wait for a GPU within a step.
        compile: value of --compile; see `worker.compile`.
        compile_cache: folder of compiled code; None leaves the place to torch.
    """

    model_path: str
    load_format: str
    dtype: str
    device: str
    seed: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_memory: int | None
    num_blocks_override: int | None
    cpu_threads: int
    cudagraph_mode: str | None = None
    cudagraph_capture_sizes: tuple[int, ...] = ()
    lazy_graphs: bool = True
    attention_backend: str = "auto"
    gpu_memory_utilization: float = 0.9
    debug_no_sync: bool = False
    compile: str = "none"
    compile_cache: str | None = None


def parse_capture_sizes(words: Iterable[str]) -> tuple[int, ...]:
    """Token counts from the option as it was written.

    Raises:
        ConfigError: a word is no number.
    """
    words = tuple(words)
    wrong = [word for word in words if not word.isdecimal()]
    if wrong:
        raise ConfigError(f"--cudagraph-capture-sizes: {wrong[0]!r} is not a number of tokens, such as 8")
    return tuple(int(word) for word in words)


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Where a GPU's memory goes, in bytes, as measured before the KV cache was made; see `memory_profile`.

    Attributes:
        total: of the device.
        budget: of that, what the server may use.
        weights, buffers, activations, graphs, other: what it uses it for; `graphs` is an estimate.
        cache: what is left.
    """

    total: int
    budget: int
    weights: int
    buffers: int
    activations: int
    graphs: int
    other: int
    cache: int


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker found out while it started.

    Attributes:
        num_blocks: blocks of the KV cache; may hold fewer tokens than `max_model_len`.
        max_model_len: most tokens of one request.
        vocab_size: token ids run from 0 to this, exclusive.
        eos_token_ids: end-of-sequence ids, from generation_config.json, else config.json.
        dtype: number format of weights and KV cache.
        device: where the model runs.
        kv_block_bytes: bytes of one block over all layers, K and V together.
        weights_bytes: bytes of the weights in memory.
        memory: where the memory goes, if the KV cache was sized by it.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    kv_block_bytes: int
    weights_bytes: int
    memory: MemoryAccount | None = None
