"""Starts the children of one server: what each is told, and which descriptors it gets."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
from dataclasses import dataclass

from streamserve.artifacts import ResolvedModel
from streamserve.bootstrap import Bootstrap, Channel
from streamserve.config import Config
from streamserve.supervisor.children import Child, Lifeline, spawn
from streamserve.supervisor.segments import SharedState

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class ChildModules:
    """What runs in the children."""

    engine: str = "streamserve.engine.process"
    frontend: str = "streamserve.frontend.process"


class Launcher:
    """Everything that a child of this server inherits, ready for the first start of one and every later one.

    Args:
        config: all options.
        model: what is served.
        modules: what runs in the children.
        shared: segments and bells.
        lifeline: ends the children when this process ends.
        listener: the bound TCP socket, for the frontends.
    """

    def __init__(
        self,
        *,
        config: Config,
        model: ResolvedModel,
        modules: ChildModules,
        shared: SharedState,
        lifeline: Lifeline,
        listener: socket.socket,
    ) -> None:
        section = dataclasses.replace(config.model, dtype=model.dtype, load_format=model.load_format)
        self._config = dataclasses.replace(config, model=section).to_dict()
        self._model = model
        self._modules = modules
        self._shared = shared
        self._lifeline = lifeline
        self._listener = listener
        # Block hashes are keyed with it: a prompt cannot be crafted to hit another tenant's cache.
        self._secret = secrets.token_bytes(SECRET_BYTES).hex()

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
            channels=self._shared.channels,
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
            listen=self._listener.fileno(),
            progress=self._shared.progress.fd,
            metrics=self._shared.metrics.fd,
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
        **for_frontends: int,
    ) -> Child:
        reports_fd, ready_fd = os.pipe()
        bootstrap = Bootstrap(
            role=role,
            index=index,
            epoch=epoch,
            secret=self._secret,
            model_path=str(self._model.path),
            model_name=self._model.name,
            config=self._config,
            channels=channels,
            lifeline=self._lifeline.read_end,
            ready=ready_fd,
            board=self._shared.board.fd,
            **for_frontends,
        )
        try:
            return spawn(name, module, bootstrap, reports_fd)
        except OSError:
            os.close(reports_fd)
            raise
        finally:
            os.close(ready_fd)
