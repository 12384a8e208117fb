"""How a child process learns what it is: a sealed JSON document and a few inherited file descriptors.

The supervisor writes one document for each child into an anonymous memory file and passes its descriptor in
argv (`python -m streamserve.engine.process --bootstrap FD`). All other descriptors are numbers inside it.
Back to the supervisor goes a line of JSON at a time over the ready pipe, at start-up only.

Children start before it is known what they serve, which may take a download: the model comes by a notice.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamserve.config import Config
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.notice import Notice

# What the supervisor sends a child that is to stop in good order. SIGTERM and SIGINT are blocked in children:
# a terminal or a service manager sends those to the whole process group at once, and only the supervisor
# knows that the frontends must finish before the engine may go.
STOP_ORDER = signal.SIGUSR1


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine and in the one format that all processes read.

    Attributes:
        path: folder with config.json, tokenizer.json and, unless `load_format` is dummy, safetensors weights.
        name: what the API calls it.
        dtype: float32, bfloat16 or float16.
        load_format: safetensors or dummy.
    """

    path: Path
    name: str
    dtype: str
    load_format: str

    def to_dict(self) -> dict[str, str]:
        """Plain data, for the way to other processes."""
        return {**dataclasses.asdict(self), "path": str(self.path)}

    @classmethod
    def from_dict(cls, data: dict[str, str]) -> ResolvedModel:
        """The inverse of `to_dict`."""
        texts = {name: text for name, text in data.items() if name != "path"}
        return cls(path=Path(data["path"]), **texts)

    def publish(self, notice: Notice) -> None:
        """Tells it to every process that reads `notice`; whoever waits must be woken besides."""
        notice.publish(json.dumps(self.to_dict()).encode())

    @classmethod
    def read(cls, notice: Notice) -> ResolvedModel | None:
        """The model in `notice`; None as long as it is not known."""
        text = notice.read()
        return cls.from_dict(json.loads(text)) if text else None

    @classmethod
    def wait(cls, notice: Notice, bell: Doorbell) -> ResolvedModel:
        """The model in `notice`, as soon as it is known; `bell` is rung then."""
        while (model := cls.read(notice)) is None:
            bell.wait(None)
        return model


@dataclass(frozen=True, slots=True)
class Channel:
    """One frontend ↔ engine pair: its descriptors, and which process it is that has the frontend's end.

    Attributes:
        request_ring: segment of the ring frontend → engine.
        delta_ring: segment of the ring engine → frontend.
        frontend_bell: eventfd that wakes the frontend (deltas, ring space, status).
        engine_bell: eventfd that wakes the engine; the same one for every frontend.
        incarnation: how many processes had the frontend's end before and died.
    """

    request_ring: int
    delta_ring: int
    frontend_bell: int
    engine_bell: int
    incarnation: int = 0

    def descriptors(self) -> tuple[int, ...]:
        """All of them, for `pass_fds`."""
        return (self.request_ring, self.delta_ring, self.frontend_bell, self.engine_bell)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Everything a child is told.

    Attributes:
        role: `model`, `engine` or `frontend`.
        index: number of this frontend (0 for the others).
        epoch: number of this engine start.
        secret: hex of the block-hash key of this server run.
        config: `Config.to_dict()`.
        channels: one for each frontend; a frontend gets its own only, and who prepares the model none.
        lifeline: pipe that reads end-of-file when the supervisor is gone.
        ready: pipe for start-up reports to the supervisor.
        model: notice with the `ResolvedModel` (engine and frontends only, else -1).
        board: segment of the status board (streamserve.ipc.board; as `model`).
        listen: the bound TCP socket (frontends only, else -1).
        progress: notice of how far the start is (streamserve.ipc.notice; frontends only, else -1).
        metrics: segment of the rows of all frontends (streamserve.frontend.metrics; frontends only, else -1).
        door: inside of this frontend's door (streamserve.ipc.door); -1 if there is but one.
        outsides: of the doors of all frontends, by index; empty as well then.
    """

    role: str
    index: int
    epoch: int
    secret: str
    config: dict[str, dict[str, Any]]
    channels: tuple[Channel, ...]
    lifeline: int
    ready: int
    model: int = -1
    board: int = -1
    listen: int = -1
    progress: int = -1
    metrics: int = -1
    door: int = -1
    outsides: tuple[int, ...] = ()

    def descriptors(self) -> tuple[int, ...]:
        """Every descriptor the child must inherit."""
        own = (self.lifeline, self.ready, self.model, self.board, self.listen, self.progress, self.metrics)
        shared = (self.door, *self.outsides, *(fd for c in self.channels for fd in c.descriptors()))
        return tuple(fd for fd in (*own, *shared) if fd >= 0)

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
        data["outsides"] = tuple(data["outsides"])
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
