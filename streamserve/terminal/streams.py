"""The standard streams as a client finds them: closed, unreadable, or full of bytes that are no text."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import TextIO

from streamserve.errors import ConfigError, StreamserveError


def open_stdin() -> TextIO:
    """stdin, where bytes that are no text read as U+FFFD.

    Raises:
        ConfigError: whoever started this process has closed it.
    """
    if sys.stdin is None:
        raise ConfigError("stdin is closed; connect it to a terminal, a file or a pipe.")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    return sys.stdin


def open_stdout() -> TextIO:
    """stdout.

    Raises:
        ConfigError: whoever started this process has closed it.
    """
    if sys.stdout is None:
        raise ConfigError("stdout is closed; connect it to a terminal, a file or a pipe.")
    return sys.stdout


def lines(stdin: TextIO) -> Iterator[str]:
    """The lines of `stdin` as they come, each with its line end.

    Raises:
        StreamserveError: it cannot be read.
    """
    while True:
        try:
            line = stdin.readline()
        except OSError as error:
            raise StreamserveError(f"cannot read stdin: {error.strerror or error}") from error
        if not line:
            return
        yield line
