"""How a process comes by its kernels."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest
import torch
from native_kernels import WIDTHS, kernels

from streamserve.worker.native import operators as operators_module
from streamserve.worker.native.build import BuildError
from streamserve.worker.native.operators import load_operators, recipe_for

pytestmark = pytest.mark.torch


def works(operators: operators_module.Operators) -> bool:
    x = torch.tensor([[3.0, 4.0]])
    return torch.allclose(operators.rms_norm(x, torch.ones(2), 0.0), x / 12.5**0.5)


def test_a_broken_cache_is_made_anew(tmp_path: Path) -> None:
    kernels(WIDTHS[0])
    recipe = recipe_for(WIDTHS[0], "streamserve_test_broken")
    path = tmp_path / recipe.file_name()
    path.write_bytes(b"\x7fELF and nothing else")
    assert works(load_operators(recipe, tmp_path))
    assert path.stat().st_size > 10_000


def test_what_is_kept_and_cannot_be_loaded_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the cache is shared with a system of other libraries."""
    kernels(WIDTHS[0])
    recipe = recipe_for(WIDTHS[0], "streamserve_test_foreign")
    foreign = b"whole, and no library"
    (tmp_path / recipe.file_name()).write_bytes(foreign + hashlib.sha256(foreign).digest())
    with caplog.at_level(logging.WARNING):
        assert works(load_operators(recipe, tmp_path))
    assert "compiled anew" in caplog.text


def test_no_place_at_all_costs_the_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> None:
        raise FileNotFoundError(2, "No usable temporary directory")

    monkeypatch.setattr(operators_module, "native_operators", nowhere)
    assert "No usable temporary" in str(operators_module.native_obstacle.__wrapped__())


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels(WIDTHS[0])
    (tmp_path / "file").touch()
    recipe = recipe_for(WIDTHS[0], "streamserve_test_read_only")
    with caplog.at_level(logging.WARNING):
        assert works(load_operators(recipe, tmp_path / "file" / "kernels"))
    assert "cannot keep compiled kernels (Not a directory)" in caplog.text


def test_what_cannot_be_loaded_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho junk > $2\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match="cannot be loaded"):
        load_operators(recipe_for((), "streamserve_test_junk"), tmp_path)
