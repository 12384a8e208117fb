"""`streamserve chat`: a conversation at a terminal, or one turn a line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from contextlib import closing
from typing import Any

from streamserve.errors import RequestFailed
from streamserve.terminal.options import check_options
from streamserve.terminal.screen import Screen
from streamserve.terminal.server import Server
from streamserve.terminal.streams import lines, open_stdin, open_stdout

PROMPT = "> "


def chat(url: str, options: dict[str, Any], system: str | None) -> int:
    """Talks until the end of stdin; returns the exit code.

    Args:
        url: address of the server.
        options: request fields; without `model` the server's first one is used.
        system: the system message, if any.

    Raises:
        ConfigError: an option is no number, or stdin or stdout is closed.
        RequestFailed: the server cannot be reached, or fails while stdin is no terminal.
        StreamserveError: stdin cannot be read, or stdout not written to.
    """
    check_options(options)
    stdin, screen = open_stdin(), Screen(open_stdout())
    with Server(url) as server:
        request = {"model": options.get("model") or server.first_model()} | options
        conversation = Conversation(server, request, system, screen)
        if stdin.isatty():
            print(f"Talking to {request['model']}. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
            _talk(conversation, screen)
        else:
            for turn in lines(stdin):
                if turn.strip():
                    conversation.say(turn.rstrip("\r\n"))
    return 0


def _talk(conversation: Conversation, screen: Screen) -> None:
    # Importing it gives input() line editing and a history.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            turn = input(PROMPT)
            if turn.strip():
                conversation.say(turn)
        except EOFError:
            screen.write("\n")
            return
        except KeyboardInterrupt:
            # At the prompt, or one too many while an answer was being stopped.
            screen.write("\n")
        except RequestFailed as error:
            print(f"streamserve: error: {error}", file=sys.stderr, flush=True)


class Conversation:
    """What was said so far, and how it goes on."""

    def __init__(self, server: Server, request: dict[str, Any], system: str | None, screen: Screen) -> None:
        self._server = server
        self._request = request
        self._messages = [{"role": "system", "content": system}] if system else []
        self._screen = screen

    def say(self, turn: str) -> None:
        """Sends one turn and shows the answer as it comes. Ctrl-C ends it; what was shown of it counts.

        Raises:
            RequestFailed: there is no answer, or only a part; the turn is forgotten.
            StreamserveError: the answer cannot be shown.
        """
        messages = [*self._messages, {"role": "user", "content": turn}]
        answer: list[str] = []
        try:
            self._stream(messages, answer)
        except KeyboardInterrupt:
            pass
        finally:
            self._screen.end_line()
        if answer:
            self._messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def _stream(self, messages: list[dict[str, str]], answer: list[str]) -> None:
        with closing(self._server.stream_chat(self._request | {"messages": messages})) as pieces:
            for piece in pieces:
                answer.append(piece)
                self._screen.write(piece)
