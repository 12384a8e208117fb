from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_recipe import GgufRecipe


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny GGUF file from the fields of a `GgufRecipe`."""

    def write(name: str = "tiny.gguf", **fields: Any) -> Path:
        return GgufRecipe(**fields).write(tmp_path / name)

    return write
