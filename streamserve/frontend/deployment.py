"""What a frontend has around it: the options of the HTTP side, the keys, the supervisor, other frontends."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamserve.config import AuthConfig, ServerConfig
from streamserve.frontend.keys import KeyRing
from streamserve.frontend.status import Board, Progress
from streamserve.frontend.tracing import Tracer
from streamserve.ipc.board import FIRST_EPOCH, EngineState
from streamserve.ipc.door import Doors


class NoSupervisor:
    """The status board and notice of a frontend that runs by itself: it never hears of a state or a start."""

    def read(self) -> tuple[int, EngineState]:
        """Whatever the engine says holds."""
        return FIRST_EPOCH, EngineState.READY


class NoProgress:
    """Nothing is said of a start."""

    def read(self) -> bytes:
        """Nothing."""
        return b""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The surroundings of one frontend. By default there are none.

    Attributes:
        server: limits, CORS, logs.
        auth: what is open without a key.
        keys: the keys of the server.
        board, progress: what the supervisor says.
        rows: metrics memory of all frontends; None where there is but this one.
        index: which of them this one is.
        tracer: makes spans, if anybody collects them.
        doors: the way to the other frontends; None where there are none.
        supervisor: process id of the supervisor; None where there is none.
    """

    server: ServerConfig = field(default_factory=ServerConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    keys: KeyRing = field(default_factory=KeyRing)
    board: Board = field(default_factory=NoSupervisor)
    progress: Progress = field(default_factory=NoProgress)
    rows: memoryview | None = None
    index: int = 0
    tracer: Tracer | None = None
    doors: Doors | None = None
    supervisor: int | None = None
