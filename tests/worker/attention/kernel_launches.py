"""What kernels would be launched with, without launching them."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Launch:
    """Attributes:
    kernel: what was to be launched.
    grid: with how many programs.
    arguments: by position; tensors among them.
    constants: by name, launch options among them.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def key(self) -> tuple[object, ...]:
        """Equal for launches that a captured graph could not tell apart: same code, sizes and addresses."""
        seen = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in self.arguments)
        return self.kernel.__name__, self.grid, seen, tuple(sorted(self.constants.items()))


class KernelLaunches(TorchDispatchMode):
    """Takes the place of all kernels of some modules; as a context it notes every torch operation too.

    Attributes:
        noted: the launches.
        operations: names of torch operations.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
        super().__init__()
        self.noted: list[Launch] = []
        self.operations: list[str] = []
        for module in modules:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, _Recorder(getattr(module, name), self.noted))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(function))
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Recorder:
    kernel: Any
    noted: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.noted.append(Launch(self.kernel, grid, arguments, constants))

        return launch
