"""What all the other figures were measured on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from typing import Any

import torch

from loadtest.gpu_check.results import Record
from loadtest.gpu_check.setting import Setting
from streamserve.worker.triton_launcher import launcher_obstacle

_PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "numpy", "tokenizers")
_MODULES = ("flash_attn", "flash_attn_interface")


def run(setting: Setting, record: Record, shared: dict[str, Any]) -> None:
    """See `SectionModule.run`."""
    table = record.table("", "what", "which")
    record.row(table, "Python", platform.python_version())
    record.row(table, "processor", f"{os.cpu_count()} cores, {platform.machine()}")
    for package in _PACKAGES:
        record.row(table, package, _version(package))
    for module in _MODULES:
        record.row(table, f"import {module}", "yes" if importlib.util.find_spec(module) else "no")
    record.check("Triton is there", importlib.util.find_spec("triton") is not None)
    if setting.is_rehearsal:
        return
    obstacle = launcher_obstacle()
    record.check("Triton can build its launcher", obstacle is None, obstacle or "")
    record.check("torch finds a CUDA device", torch.cuda.is_available())
    properties = torch.cuda.get_device_properties(0)
    record.row(table, "GPU", properties.name)
    record.row(table, "compute capability", f"{properties.major}.{properties.minor}")
    record.row(table, "memory", f"{properties.total_memory / 2**30:.1f} GiB")
    record.row(table, "CUDA of torch", str(torch.version.cuda))
    record.row(table, "driver", _driver())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.mem,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
