"""`streamserve complete`: one continuation, printed as it comes."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from streamserve.terminal.options import check_options
from streamserve.terminal.screen import Screen
from streamserve.terminal.server import Server
from streamserve.terminal.streams import lines, open_stdin, open_stdout


def complete(url: str, options: dict[str, Any], prompt: str) -> int:
    """Prints the continuation of `prompt`, or of stdin when that is `-`; returns the exit code.

    Args:
        url: address of the server.
        options: request fields; without `model` the server's first one is used.
        prompt: the text.

    Raises:
        ConfigError: an option is no number, or a stream that is needed is closed.
        RequestFailed: the server cannot be reached, refuses, or breaks off.
        StreamserveError: stdin cannot be read, or stdout not written to.
    """
    check_options(options)
    screen = Screen(open_stdout())
    text = "".join(lines(open_stdin())) if prompt == "-" else prompt
    with Server(url) as server:
        body = {"model": options.get("model") or server.first_model()} | options | {"prompt": text}
        try:
            with closing(server.stream_completion(body)) as pieces:
                for piece in pieces:
                    screen.write(piece)
        finally:
            screen.end_line()
    return 0
