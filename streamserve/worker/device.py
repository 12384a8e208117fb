"""Which device and which number format a worker computes with."""

from __future__ import annotations

import math

import numpy as np
import torch

from streamserve.errors import ConfigError
from streamserve.host_memory import available_bytes

# Where it does not begin one, each head of a KV cache takes a line more than it must.
_CACHE_LINE = 64

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    """The number format called `name`; `auto` is float32 on a CPU, bfloat16 on CUDA.

    Raises:
        ConfigError: no format is called so.
    """
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name}: not supported; use {', '.join(_DTYPES)}")
    return _DTYPES[name]


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the attention of whole prompts is computed in, for K and V kept in `dtype`.

    torch's kernel for CPUs multiplies 16-bit numbers in tiles where the processor has them (AMX), and takes
    two to three times as long as for float32 where it has not.
    """
    if device.type != "cpu" or dtype.itemsize != 2:
        return dtype
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    is_fast = dtype is torch.bfloat16 and has_tiles is not None and has_tiles()
    return dtype if is_fast else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32, and so on."""
    return str(dtype).removeprefix("torch.")


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cpu":
        return available_bytes()
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like torch.zeros, but a CPU's memory is only committed where it is written. It begins a cache line.

    Raises:
        MemoryError, RuntimeError: the memory cannot be had.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the kernel for zero pages where torch would write the zeros.
    num_bytes = math.prod(shape) * int(dtype.itemsize)
    memory = np.zeros(num_bytes + _CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
