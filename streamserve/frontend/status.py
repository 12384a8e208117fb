"""What this server is doing, in a word: for probes, and for people who wait for a model to load."""

from __future__ import annotations

import json
from typing import Any, Protocol

from streamserve.frontend.client import EngineClient
from streamserve.ipc.board import FIRST_EPOCH, EngineState

_WORDS = {
    EngineState.STARTING: "loading",
    EngineState.READY: "ok",
    EngineState.DRAINING: "draining",
    EngineState.DEAD: "dead",
}


class Board(Protocol):
    """What the supervisor says about the engine (streamserve.ipc.board.StatusBoard)."""

    def read(self) -> tuple[int, EngineState]:
        """`(epoch, state)`."""


class Progress(Protocol):
    """How far the engine's start is (streamserve.ipc.notice.Notice)."""

    def read(self) -> bytes:
        """JSON; empty before there is anything to say."""


class ServerStatus:
    """Joins what the supervisor says and what this frontend sees.

    Args:
        client: the way to the engine.
        board: the supervisor's status board.
        progress: the supervisor's notice of a start's progress.
    """

    def __init__(self, client: EngineClient, board: Board, progress: Progress) -> None:
        self._client = client
        self._board = board
        self._progress = progress

    @property
    def word(self) -> str:
        """`ok`, `loading`, `restarting`, `draining`, `stuck` or `dead`."""
        if self._client.is_healthy:
            return "ok"
        word = _WORDS[self._client.state]
        if word == "loading" and self._board.read()[0] > FIRST_EPOCH:
            return "restarting"
        return "stuck" if word == "ok" else word

    @property
    def num_restarts(self) -> int:
        """How often the engine has been started again."""
        return max(0, self._board.read()[0] - FIRST_EPOCH)

    def describe(self) -> dict[str, Any]:
        """The status word and, while a model loads, how far that is."""
        word = self.word
        return while_loading(word, self._progress) if word in ("loading", "restarting") else {"status": word}


def while_loading(word: str, progress: Progress) -> dict[str, Any]:
    """The body of an answer during a start: what it is called, and how far it is."""
    said = progress.read()
    return {"status": word, "progress": json.loads(said) if said else None}
