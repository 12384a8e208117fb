"""What `pip install` installs."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all files in the wheel."""
    # A copy: the builder writes beside what it builds.
    root = tmp_path_factory.mktemp("checkout")
    for folder in ("streamserve", "clients"):
        ignored = shutil.ignore_patterns("__pycache__", "node_modules")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, root / file)
    (wheel,) = WheelBuilder(str(root)).build(directory=str(root / "dist"))
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_module_is_in_it(names: set[str]) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "streamserve").rglob("*.py")}
    assert modules <= names


def test_the_files_of_the_web_pages_are_in_it_and_no_others_of_clients(names: set[str]) -> None:
    public = ROOT / "clients" / "web" / "public"
    files = {path.relative_to(public).as_posix() for path in public.rglob("*") if path.is_file()}
    assert {"chat.html", "js/chat.js", "css/tokens.css", "vendor/marked.LICENSE.txt"} <= files
    assert {name for name in names if name.startswith("streamserve/frontend/web/")} == {
        f"streamserve/frontend/web/{name}" for name in files
    }
    assert not {name for name in names if name.startswith("clients")}
