"""Which device and which number format a worker computes with."""

from __future__ import annotations

from pathlib import Path

import torch

from streamserve.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


def resolve_device(name: str) -> torch.device:
    """The device called `name`; `auto` is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: there is no such device here.
    """
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch finds no CUDA device; use --device cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: not supported; use cpu or cuda")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format called `name`; `auto` is bfloat16 where the processor has it, else float32.

    Raises:
        ConfigError: no format is called so.
    """
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" or _cpu_has_bfloat16() else "float32"
    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name}: not supported; use {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32, and so on."""
    return str(dtype).removeprefix("torch.")


def _cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        words = cpuinfo.read_text().split()
    except OSError:
        return False
    return not _BFLOAT16_FLAGS.isdisjoint(words)
