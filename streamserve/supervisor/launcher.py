"""Starts the children of one server: what each is told, and which descriptors it gets."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass

from streamserve.bootstrap import Bootstrap, Channel
from streamserve.config import Config
from streamserve.hashing import SECRET_BYTES
from streamserve.supervisor.children import Child, Lifeline, spawn
from streamserve.supervisor.segments import SharedState


@dataclass(frozen=True, slots=True)
class ChildModules:
    """What runs in the children."""

    model: str = "streamserve.artifacts.process"
    engine: str = "streamserve.engine.process"
    frontend: str = "streamserve.frontend.process"


class Launcher:
    """Everything that a child of this server inherits, ready for the first start of one and every later one.

    Args:
        config: all options.
        modules: what runs in the children.
        shared: segments and bells.
        lifeline: ends the children when this process ends.
        listener: the bound TCP socket, for the frontends.
    """

    def __init__(
        self,
        *,
        config: Config,
        modules: ChildModules,
        shared: SharedState,
        lifeline: Lifeline,
        listener: socket.socket,
    ) -> None:
        self._config = config.to_dict()
        self._modules = modules
        self._shared = shared
        self._lifeline = lifeline
        self._listener = listener
        # Block hashes are keyed with it: a prompt cannot be crafted to hit another tenant's cache.
        self._secret = secrets.token_bytes(SECRET_BYTES).hex()

    def model(self) -> Child:
        """Starts what finds, downloads or converts the model, and ends when it has.

        Raises:
            OSError: no process could be started.
        """
        return self._start("model process", self._modules.model, role="model", index=0, epoch=0, channels=())

    def engine(self, epoch: int) -> Child:
        """Starts the engine, with the channels of all frontends.

        Raises:
            OSError: no process could be started.
        """
        return self._start(
            "engine",
            self._modules.engine,
            role="engine",
            index=0,
            epoch=epoch,
            channels=tuple(self._shared.channels),
            model=self._shared.model.fd,
            board=self._shared.board.fd,
        )

    def frontend(self, index: int, epoch: int) -> Child:
        """Starts frontend number `index`, with its own channel and the TCP socket.

        Raises:
            OSError: no process could be started.
        """
        name = "frontend" if len(self._shared.channels) == 1 else f"frontend {index}"
        return self._start(
            name,
            self._modules.frontend,
            role="frontend",
            index=index,
            epoch=epoch,
            channels=(self._shared.channels[index],),
            model=self._shared.model.fd,
            board=self._shared.board.fd,
            listen=self._listener.fileno(),
            progress=self._shared.progress.fd,
            metrics=self._shared.metrics.fd,
            door=self._shared.inside(index),
            outsides=self._shared.outsides,
        )

    def _start(
        self,
        name: str,
        module: str,
        *,
        role: str,
        index: int,
        epoch: int,
        channels: tuple[Channel, ...],
        outsides: tuple[int, ...] = (),
        **segments: int,
    ) -> Child:
        reports_fd, ready_fd = os.pipe()
        bootstrap = Bootstrap(
            role=role,
            index=index,
            epoch=epoch,
            secret=self._secret,
            config=self._config,
            channels=channels,
            lifeline=self._lifeline.read_end,
            ready=ready_fd,
            outsides=outsides,
            **segments,
        )
        try:
            return spawn(name, module, bootstrap, reports_fd)
        except OSError:
            os.close(reports_fd)
            raise
        finally:
            os.close(ready_fd)
