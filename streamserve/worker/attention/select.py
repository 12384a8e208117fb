"""Which attention backend a worker uses, and what is in the way of the others."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamserve.errors import ConfigError
from streamserve.worker.triton_launcher import launcher_obstacle

if TYPE_CHECKING:
    import torch

    from streamserve.worker.attention.base import AttentionBackend
    from streamserve.worker.attention.variant import AttentionVariant
    from streamserve.worker.batch import BatchShape
    from streamserve.worker.kv_cache import KVCache

_PACKAGES = ("triton", "flash_attn", "flash_attn_interface")
_MOST_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What the choice depends on.

    Attributes:
        device: `cpu` or `cuda`.
        capability: CUDA compute capability, (0, 0) on a CPU.
        dtype: `bfloat16` and so on, of activations and cache.
        head_dim: of the model.
        block_size: tokens in a KV cache block.
        packages: those of `triton`, `flash_attn` and `flash_attn_interface` that are installed.
        interprets_triton: kernels run in Triton's interpreter, on any device and very slowly.
        launcher_obstacle: why no kernel in Triton can be launched on CUDA; see `triton_launcher`.
        native_obstacle: why there are no native kernels for a CPU; see `native.operators`.
    """

    device: str
    capability: tuple[int, int]
    dtype: str
    head_dim: int
    block_size: int
    packages: frozenset[str]
    interprets_triton: bool = False
    launcher_obstacle: str | None = None
    native_obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend that works here.

    Attributes:
        name: the value of --attention-backend that allows it.
        label: what it is called in messages.
        reason: one line for the log: what was chosen, and what was in the way of what goes before it.
        create: makes the backend.
    """

    name: str
    label: str
    reason: str
    create: Callable[[KVCache, BatchShape, AttentionVariant], AttentionBackend]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A backend that may work.

    Attributes:
        name: the value of --attention-backend that allows it.
        label: for messages.
        is_automatic: whether `auto` allows it too.
        block_multiple: the block size must be a multiple of this.
        obstacle: why it does not work with given facts, and what would; None if it does.
        create: see `AttentionChoice`.
    """

    name: str
    label: str
    is_automatic: bool
    block_multiple: int
    obstacle: Callable[[AttentionFacts], str | None]
    create: Callable[[KVCache, BatchShape, AttentionVariant], AttentionBackend]


def find_attention_facts(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, wanted: str = "auto"
) -> AttentionFacts:
    """The facts of this machine and a model; see `AttentionFacts`.

    Args:
        device, dtype, head_dim, block_size: of the model and its cache.
        wanted: value of --attention-backend. Native kernels are compiled if they may be what is used.
    """
    import torch

    on_cuda = device.type == "cuda"
    facts = AttentionFacts(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if on_cuda else (0, 0),
        dtype=str(dtype).removeprefix("torch."),
        head_dim=head_dim,
        block_size=block_size,
        packages=frozenset(package for package in _PACKAGES if _is_installed(package)),
        interprets_triton=os.environ.get("TRITON_INTERPRET") == "1",
        launcher_obstacle=launcher_obstacle() if on_cuda else None,
    )
    if wanted not in ("auto", "cpu") or _cpu_obstacle(facts) is not None:
        return facts
    from streamserve.worker.native.operators import native_obstacle

    return replace(facts, native_obstacle=native_obstacle())


def choose_attention_backend(name: str, facts: AttentionFacts) -> AttentionChoice:
    """The first backend in order of speed that works.

    FlashAttention-2 is never chosen by `auto`: its blocks of 256 tokens make for a coarse prefix cache.

    Args:
        name: `auto`, `cpu`, `torch`, `triton` or `flash_attn`.
        facts: what there is.

    Raises:
        ConfigError: none does; the message says what is in the way and what would help.
    """
    if name == "auto":
        # Fit for tests alone.
        facts = replace(facts, interprets_triton=False)
    obstacles: dict[str, list[str]] = {}
    for candidate in _CANDIDATES:
        if name != candidate.name and not (name == "auto" and candidate.is_automatic):
            continue
        obstacle = candidate.obstacle(facts) or _block_obstacle(candidate, facts.block_size)
        if obstacle is None:
            reason = f"attention backend: {candidate.label}"
            if obstacles:
                reason += f" ({_listed(obstacles)})"
            return AttentionChoice(candidate.name, candidate.label, reason, candidate.create)
        obstacles.setdefault(obstacle, []).append(candidate.label)
    raise ConfigError(f"--attention-backend {name}: {_listed(obstacles)}")


def _listed(obstacles: dict[str, list[str]]) -> str:
    return "; ".join(f"{' and '.join(labels)}: {obstacle}" for obstacle, labels in obstacles.items())


def _is_installed(package: str) -> bool:
    """A bare folder is none: FlashAttention-4 leaves one called flash_attn, with its own in it."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _block_obstacle(candidate: _Candidate, block_size: int) -> str | None:
    multiple = candidate.block_multiple
    if block_size % multiple == 0:
        return None
    return f"takes no blocks of {block_size} tokens, use --block-size {multiple} or a multiple of it"


def _triton_obstacle(facts: AttentionFacts) -> str | None:
    if facts.device == "cpu" and not facts.interprets_triton:
        return "needs a CUDA device, use --device cuda or --attention-backend torch"
    if "triton" not in facts.packages:
        return "needs the package triton, pip install 'streamserve[gpu]' or use --attention-backend torch"
    if facts.device == "cuda" and facts.capability < (8, 0):
        return f"needs compute capability 8.0 and this is {_dotted(facts)}, use --attention-backend torch"
    return facts.launcher_obstacle or _head_dim_obstacle(facts)


def _flash_2_obstacle(facts: AttentionFacts) -> str | None:
    if facts.device == "cpu":
        return "needs a CUDA device, use --device cuda or --attention-backend torch"
    if "flash_attn" not in facts.packages:
        return (
            "needs the package flash-attn, pip install 'streamserve[flash]' or use --attention-backend triton"
        )
    if facts.capability < (8, 0):
        return f"needs compute capability 8.0 and this is {_dotted(facts)}, use --attention-backend torch"
    return _flash_obstacle(facts)


def _flash_3_obstacle(facts: AttentionFacts) -> str | None:
    if facts.device == "cpu":
        return "needs a CUDA device, use --device cuda or --attention-backend torch"
    if "flash_attn_interface" not in facts.packages:
        return "needs the package flash_attn_interface, built from flash-attention's folder hopper"
    if facts.capability[0] != 9:
        return f"needs compute capability 9.x and this is {_dotted(facts)}, use --attention-backend triton"
    return _flash_obstacle(facts)


def _flash_obstacle(facts: AttentionFacts) -> str | None:
    """What both versions lack."""
    if facts.dtype not in ("bfloat16", "float16"):
        return f"does not compute in {facts.dtype}, use --dtype bfloat16 or --attention-backend triton"
    if facts.head_dim % 8:
        return f"takes no head dimension of {facts.head_dim}, use --attention-backend triton"
    if "triton" not in facts.packages:
        return "needs the package triton to fill the cache, pip install 'streamserve[gpu]'"
    return facts.launcher_obstacle or _head_dim_obstacle(facts)


def _cpu_obstacle(facts: AttentionFacts) -> str | None:
    if facts.device != "cpu":
        return "needs the model on a CPU, use --device cpu or --attention-backend triton"
    if facts.dtype not in ("bfloat16", "float32"):
        return f"does not compute in {facts.dtype}, use --dtype bfloat16 or --attention-backend torch"
    return facts.native_obstacle


def _head_dim_obstacle(facts: AttentionFacts) -> str | None:
    if facts.head_dim > _MOST_HEAD_DIM:
        most = f"{facts.head_dim}, only up to {_MOST_HEAD_DIM}"
        return f"takes no head dimension of {most}, use --attention-backend torch"
    return None


def _dotted(facts: AttentionFacts) -> str:
    return f"{facts.capability[0]}.{facts.capability[1]}"


# The modules of the backends are imported when one is made: each needs its package.
def _create_flash_3(cache: KVCache, shape: BatchShape, variant: AttentionVariant) -> AttentionBackend:
    from streamserve.worker.attention.flash_attn import FlashAttention3

    return FlashAttention3(cache, shape, variant)


def _create_flash_2(cache: KVCache, shape: BatchShape, variant: AttentionVariant) -> AttentionBackend:
    from streamserve.worker.attention.flash_attn import FlashAttention2

    return FlashAttention2(cache, shape, variant)


def _create_triton(cache: KVCache, shape: BatchShape, variant: AttentionVariant) -> AttentionBackend:
    from streamserve.worker.attention.triton_paged import TritonPagedAttention

    return TritonPagedAttention(cache, shape, variant)


def _create_cpu(cache: KVCache, shape: BatchShape, variant: AttentionVariant) -> AttentionBackend:
    from streamserve.worker.attention.cpu_paged import CpuPagedAttention
    from streamserve.worker.native.operators import native_operators

    return CpuPagedAttention(cache, variant, native_operators())


def _create_torch(cache: KVCache, shape: BatchShape, variant: AttentionVariant) -> AttentionBackend:
    from streamserve.worker.attention.torch_paged import TorchPagedAttention

    return TorchPagedAttention(cache)


# In order of speed.
_CANDIDATES = (
    _Candidate("flash_attn", "FlashAttention-3", True, 1, _flash_3_obstacle, _create_flash_3),
    _Candidate("flash_attn", "FlashAttention-2", False, 256, _flash_2_obstacle, _create_flash_2),
    _Candidate("triton", "Triton", True, 16, _triton_obstacle, _create_triton),
    _Candidate("cpu", "native CPU", True, 1, _cpu_obstacle, _create_cpu),
    _Candidate("torch", "torch", True, 1, lambda facts: None, _create_torch),
)
