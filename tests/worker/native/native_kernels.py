"""The kernels compiled for every width of vectors that this processor has."""

from __future__ import annotations

import functools
import platform

import pytest

from streamserve.config import cache_root
from streamserve.worker.native.build import BuildError, target_of_this_machine, targets_of
from streamserve.worker.native.operators import Operators, load_operators, native_operators, recipe_for


def _widths() -> list[tuple[str, ...]]:
    """From the widest that this machine has down; each level of x86-64 has those below."""
    levels = sorted(targets_of(platform.machine()), reverse=True)
    return levels[levels.index(target_of_this_machine()) :]


WIDTHS = _widths()


@functools.cache
def kernels(target: tuple[str, ...]) -> Operators:
    """Compiled once and kept, as the server keeps them; skips where there is no compiler."""
    try:
        if target == target_of_this_machine():
            return native_operators()
        name = "streamserve_test_" + "_".join(target).replace("-march=", "").replace("-", "_")
        return load_operators(recipe_for(target, name), cache_root() / "kernels")
    except BuildError as error:
        if "finds no C++ compiler" not in str(error):
            raise
        pytest.skip(str(error))
