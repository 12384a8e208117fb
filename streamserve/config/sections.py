"""The options of model, cache, scheduler, worker and supervisor, and all sections together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from streamserve.config.http import ApiConfig, AuthConfig, ServerConfig, TlsConfig
from streamserve.config.options import option


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served, and how it is held."""

    model: str | None = option(
        None,
        "Local Hugging Face folder, GGUF file, hub id or alias; the default is SmolLM2-135M-Instruct.",
        kind="str",
        positional=True,
    )
    served_model_name: str | None = option(
        None, "Model name in the API; the default is the last part of MODEL.", kind="str"
    )
    load_format: str = option(
        "auto",
        "auto reads the weights; dummy fills them with random numbers (for tests and benchmarks).",
        kind="str",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = option(
        "auto",
        "Number format of weights and KV cache; auto is bfloat16 where the processor computes in it, "
        "else float32.",
        kind="str",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = option(
        None,
        "Most tokens of prompt and answer together; the default is what the model was made for.",
        kind="count",
        minimum=1,
    )
    device: str = option("auto", "Where the model runs.", kind="str", choices=("auto", "cpu", "cuda"))
    seed: int | None = option(
        None,
        "Seed for requests that bring none, and for dummy weights; the default is a fresh one a start.",
        kind="int",
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(
        None,
        "Tokens in a KV cache block; the default is 16 on a CPU, else 64, or 256 with --attention-backend "
        "flash_attn.",
        kind="count",
        minimum=1,
    )
    kv_cache_memory: int | None = option(
        None,
        "Bytes for the KV cache (512M, 4G …); the default is a quarter of the free memory, at most 4G, and "
        "on a GPU what --gpu-memory-utilization leaves.",
        kind="bytes",
        minimum=1,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Share of a GPU's memory that the server may use, weights and all; what is left of it becomes KV "
        "cache. Without meaning on a CPU, or where one of the two options beside it gives the size.",
        kind="float",
        minimum=0.01,
    )
    num_gpu_blocks_override: int | None = option(
        None, "Exact number of KV cache blocks, whatever the memory.", kind="count", minimum=1
    )
    enable_prefix_caching: bool = option(
        True, "Reuse the KV blocks of prompts that begin alike.", kind="bool"
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How many requests and tokens share a step."""

    max_num_seqs: int | None = option(
        None, "Most requests in a step; the default is 64 on a CPU.", kind="count", minimum=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Token budget of a step, prefill and decode together; the default is 512 on a CPU.",
        kind="count",
        minimum=1,
    )
    long_prefill_token_threshold: int = option(
        0,
        "Most prompt tokens of one request in a step; 0 is the whole budget for a prompt that is alone and "
        "half of what is free for one that is not.",
        kind="count",
    )
    scheduling_policy: str = option(
        "fcfs",
        "Whose turn it is: first come first served, by the request's priority, or in fair shares between "
        "API keys.",
        kind="str",
        choices=("fcfs", "priority", "fair"),
    )
    document_share: float = option(
        0.35,
        "Most of the time, as a share, that reading prompts of more than four token budgets may take while "
        "others' answers stream; 1 is no limit.",
        kind="float",
        minimum=0.05,
    )
    mixed_step_limit: float = option(
        0.25,
        "Longest, in seconds, that reading prompts may make a step in which answers stream, so that text "
        "flows; three times what the answers take alone where that is more. 0 is no limit.",
        kind="float",
        minimum=0,
    )
    async_scheduling: bool | None = option(
        None,
        "Decide the next step while the last one runs; the default is yes on a GPU and no on a CPU, where it "
        "does not pay.",
        kind="bool",
    )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How the model is computed."""

    cpu_threads: int = option(
        0,
        "Threads for the model on a CPU; 0 is one for each core that the process is granted, or one for a "
        "small model.",
        kind="int",
        minimum=0,
    )
    attention_backend: str = option(
        "auto",
        "What computes attention: native kernels for a CPU, which a C++ compiler compiles at the first "
        "start, plain torch, kernels in Triton, or the flash-attn package. auto takes the fastest that works "
        "here and says in the log what was in the way of others.",
        kind="str",
        choices=("auto", "cpu", "torch", "triton", "flash_attn"),
    )
    compile: str = option(
        "none",
        "Fuse the model's small operations with torch.compile, see docs/compile.md: in the pieces between "
        "attentions, compiled once for all layers, or in the whole model, for comparison. Needs a C++ "
        "compiler on a CPU, and Triton on CUDA.",
        kind="str",
        choices=("none", "pieces", "whole"),
    )
    cudagraph_mode: str | None = option(
        None,
        "Which steps run from captured CUDA graphs, see docs/graphs.md; the default is FULL_AND_PIECEWISE on "
        "CUDA and NONE on a CPU, where graphs are only emulated, for tests.",
        kind="str",
        choices=("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
    )
    cudagraph_capture_sizes: tuple[str, ...] = option(
        (),
        "Numbers of tokens that graphs are captured for; the default is dense for small steps and coarse for "
        "larger ones, up to 512.",
        kind="list",
    )
    enforce_eager: bool = option(False, "Run everything without CUDA graphs.", kind="bool")
    lazy_graphs: bool = option(
        True, "Capture graphs while the server already serves, rather than before.", kind="bool"
    )
    debug_no_sync: bool = option(
        False,
        "For developers: end the engine with an error if anything within a step has it wait for the GPU.",
        kind="bool",
    )


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """How the processes are watched."""

    startup_timeout: float = option(
        600.0, "Seconds until a start that is not ready counts as failed.", kind="float", minimum=1
    )
    heartbeat_timeout: float = option(
        30.0, "Seconds of silence from the engine until /health says 503.", kind="float", minimum=0.1
    )
    drain_timeout: float = option(
        30.0, "Seconds that open streams may take to finish after SIGTERM.", kind="float", minimum=0
    )
    engine_failure_grace: float = option(
        5.0,
        "Seconds that the server goes on answering 503 once it has given its engine up "
        "(--max-engine-restarts), before it exits with 1.",
        kind="float",
        minimum=0,
    )
    max_engine_restarts: int = option(
        5,
        "How often in a row an engine that died is started again, to go on with all requests, before the "
        "server ends; one that served for five minutes begins a new row. 0 ends the server, and its streams "
        "with an error, when the engine dies.",
        kind="count",
    )
    max_frontend_restarts: int = option(
        5,
        "How often in a row a frontend that died is started again before the server ends; one that lived for "
        "five minutes begins a new row.",
        kind="count",
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All sections. Only the supervisor and the command line see it whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data, for the hand-over to child processes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Any]]) -> Config:
        """The inverse of `to_dict`, also after a way through JSON."""
        return cls(**{name: section(**_frozen(data[name])) for name, section in sections()})


def _frozen(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def sections() -> list[tuple[str, Any]]:
    """Name and class of each section, in the order of the documentation."""
    return [(item.name, item.default_factory) for item in fields(Config)]


def options() -> Iterator[tuple[str, Field[Any]]]:
    """Every option, with the name of its section."""
    for name, section in sections():
        for item in fields(section):
            yield name, item
