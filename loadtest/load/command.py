"""locust's command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_OPTIONS = ("--locustfile=", "-f")


def for_one_file(command: Sequence[str], file: Path) -> list[str]:
    """The command with `file` wherever it names the folder that `file` is in."""
    return [_replace(word, file) for word in command]


def _replace(word: str, file: Path) -> str:
    prefix = next((option for option in _OPTIONS if word.startswith(option)), "")
    path = word.removeprefix(prefix)
    is_folder = bool(path) and Path(path).is_dir() and Path(path).resolve() == file.parent
    return f"{prefix}{file}" if is_folder else word
