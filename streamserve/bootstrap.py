"""How a child process learns what it is: a sealed JSON document and a few inherited file descriptors.

The supervisor writes one document for each child into an anonymous memory file and passes its descriptor in
argv (`python -m streamserve.engine.process --bootstrap FD`). All other descriptors are numbers inside it.
Back to the supervisor goes a line of JSON at a time over the ready pipe, at start-up only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
from dataclasses import dataclass
from typing import Any

from streamserve.config import Config

# What the supervisor sends a child that is to stop in good order. SIGTERM and SIGINT are blocked in children:
# a terminal or a service manager sends those to the whole process group at once, and only the supervisor
# knows that the frontends must finish before the engine may go.
STOP_ORDER = signal.SIGUSR1


@dataclass(frozen=True, slots=True)
class Channel:
    """The descriptors of one frontend ↔ engine pair.

    Attributes:
        request_ring: segment of the ring frontend → engine.
        delta_ring: segment of the ring engine → frontend.
        frontend_bell: eventfd that wakes the frontend (deltas, ring space, status).
        engine_bell: eventfd that wakes the engine; the same one for every frontend.
    """

    request_ring: int
    delta_ring: int
    frontend_bell: int
    engine_bell: int

    def descriptors(self) -> tuple[int, ...]:
        """All of them, for `pass_fds`."""
        return (self.request_ring, self.delta_ring, self.frontend_bell, self.engine_bell)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Everything a child is told.

    Attributes:
        role: `engine` or `frontend`.
        index: number of this frontend (0 for the engine).
        epoch: number of this engine start.
        secret: hex of the block-hash key of this server run.
        model_path: local folder that holds config.json, tokenizer.json and the weights.
        model_name: the name the API serves it under.
        config: `Config.to_dict()`.
        channels: one for each frontend; a frontend gets its own only.
        lifeline: pipe that reads end-of-file when the supervisor is gone.
        ready: pipe for start-up reports to the supervisor.
        board: segment of the status board (streamserve.ipc.board).
        listen: the bound TCP socket (frontends only, else -1).
        progress: notice of how far the start is (streamserve.ipc.notice; frontends only, else -1).
        metrics: segment of the rows of all frontends (streamserve.frontend.metrics; frontends only, else -1).
    """

    role: str
    index: int
    epoch: int
    secret: str
    model_path: str
    model_name: str
    config: dict[str, dict[str, Any]]
    channels: tuple[Channel, ...]
    lifeline: int
    ready: int
    board: int
    listen: int = -1
    progress: int = -1
    metrics: int = -1

    def descriptors(self) -> tuple[int, ...]:
        """Every descriptor the child must inherit."""
        own = (self.lifeline, self.ready, self.board, self.listen, self.progress, self.metrics)
        return tuple(fd for fd in own if fd >= 0) + tuple(fd for c in self.channels for fd in c.descriptors())

    def settings(self) -> Config:
        """The configuration, typed."""
        return Config.from_dict(self.config)

    def write(self) -> int:
        """Writes the document into a new memory file and returns its descriptor."""
        fd = os.memfd_create("streamserve-bootstrap")
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(json.dumps(dataclasses.asdict(self)).encode())
        return fd

    @classmethod
    def read(cls, fd: int) -> Bootstrap:
        """Reads the document in `fd` and closes it."""
        with os.fdopen(fd, "rb") as file:
            file.seek(0)
            data = json.loads(file.read())
        data["channels"] = tuple(Channel(**channel) for channel in data["channels"])
        return cls(**data)

    @classmethod
    def from_argv(cls, argv: list[str] | None = None) -> Bootstrap:
        """Reads the document named on the command line of a child."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--bootstrap", type=int, required=True)
        return cls.read(parser.parse_args(argv).bootstrap)


class ReadyPipe:
    """The child's end of the ready pipe: progress while it starts, then `ready` or `failed`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def progress(self, what: str, fraction: float) -> None:
        """Says what is going on and how far it is, from 0 to 1."""
        self._send({"type": "progress", "what": what, "fraction": round(fraction, 3)})

    def ready(self, facts: dict[str, Any]) -> None:
        """Says that the child serves, with what the supervisor may want to print."""
        self._send({"type": "ready", "facts": facts})

    def failed(self, message: str) -> None:
        """Says in one line why the child cannot start."""
        self._send({"type": "failed", "message": message})

    def _send(self, message: dict[str, Any]) -> None:
        # A failed write means that the supervisor is gone; the lifeline then ends this process.
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(message).encode() + b"\n")
