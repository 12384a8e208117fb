"""Typed access to the keys of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamserve.errors import ConfigError

_MISSING = object()


class GgufMetadata:
    """The keys of one file. Keys of the model are asked for without the architecture in front of them.

    Args:
        path: the file, for messages.
        values: every key of the file with its value as plain Python data.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values
        self.architecture: str = values["general.architecture"]

    def model(self, key: str, default: Any = _MISSING) -> Any:
        """The value of a model key, e.g. `block_count`.

        Raises:
            ConfigError: it is missing and there is no default.
        """
        return self._get(f"{self.architecture}.{key}", default)

    def tokenizer(self, key: str, default: Any = _MISSING) -> Any:
        """The value of a tokenizer key, e.g. `ggml.tokens`.

        Raises:
            ConfigError: it is missing and there is no default.
        """
        return self._get(f"tokenizer.{key}", default)

    def token_id(self, role: str) -> int | None:
        """The id of the token with a role (`bos`, `eos`, `unknown`, `padding`, `eot` …), if there is one."""
        value = self.tokenizer(f"ggml.{role}_token_id", None)
        return None if value is None else int(value)

    def error(self, what: str) -> ConfigError:
        """An error about this file, to be raised."""
        return ConfigError(f"MODEL {self._path}: {what}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is _MISSING:
            raise self.error(f"the GGUF file lacks the key {key}; convert the model again with a newer tool.")
        return value


def one_line(error: Exception) -> str:
    """What `error` says, without the line breaks of some libraries."""
    return " ".join(str(error).split()) or type(error).__name__
