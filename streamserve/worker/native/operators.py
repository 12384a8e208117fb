"""The native kernels as operators of torch: found compiled, or compiled and kept for later starts."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from streamserve.config import cache_root
from streamserve.errors import ConfigError
from streamserve.worker.native.build import BuildError, Recipe, build, find_build, target_of_this_machine

logger = logging.getLogger(__name__)

# Beside the sources: where an image may have them, whose user may write nowhere and has no compiler.
BUILT_FOLDER = Path(__file__).parent / "built"
_FOLDER = "kernels"


@dataclass(frozen=True, slots=True)
class Operators:
    """What was compiled; the schemas and what each argument is are in source/operators.cpp.

    Attributes:
        attend: puts K and V into the cache of a layer and attends.
        rms_norm, add_rms_norm, silu_mul, turn: what `models.operations.LayerOperations` asks for.
    """

    attend: Callable[..., None]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    turn: Callable[..., None]


def recipe_for(target: tuple[str, ...], namespace: str = "streamserve_cpu") -> Recipe:
    """For this torch; see `Recipe`."""
    return Recipe(Path(torch.__file__).parent, str(torch.__version__), target, namespace)


@functools.cache
def native_obstacle() -> str | None:
    """Compiles the kernels if need be and loads them; why that cannot be, and what would help, or None.

    Asked once a process: the first answer stays.
    """
    try:
        native_operators()
    except (BuildError, ConfigError, OSError) as error:
        return str(error)
    return None


@functools.cache
def native_operators() -> Operators:
    """The kernels for this machine.

    Raises:
        BuildError: they cannot be had.
        ConfigError: nothing says where the cache is.
    """
    return load_operators(recipe_for(target_of_this_machine()), cache_root() / _FOLDER)


def load_operators(recipe: Recipe, folder: Path) -> Operators:
    """Loads what `folder` or the package has, else compiles it into `folder`.

    Args:
        recipe: whose namespace nothing else was loaded under.
        folder: for what is compiled. Where it cannot be written to, the next start compiles again.

    Raises:
        BuildError: no compiler, or it fails, or what it makes cannot be loaded.
        OSError: there is no place for it at all.
    """
    for kept in (BUILT_FOLDER, folder):
        found = find_build(recipe, kept)
        if found is not None:
            try:
                return _loaded(recipe, found)
            except BuildError as error:
                # As where a cache is shared with a system of other libraries.
                logger.warning("%s; it is compiled anew", error)
    try:
        return _loaded(recipe, build(recipe, folder))
    except OSError as error:
        logger.warning(
            "%s: cannot keep compiled kernels (%s); every start compiles them", folder, error.strerror
        )
        with tempfile.TemporaryDirectory(prefix="streamserve-") as temporary:
            return _loaded(recipe, build(recipe, Path(temporary)))


def _loaded(recipe: Recipe, path: Path) -> Operators:
    try:
        torch.ops.load_library(str(path))
        namespace: Any = getattr(torch.ops, recipe.namespace)
        return Operators(*(getattr(namespace, field.name).default for field in fields(Operators)))
    except (OSError, RuntimeError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
