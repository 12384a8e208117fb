"""The `streamserve serve` process: from a configuration to a server that has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys

import streamserve
from streamserve.config import Config
from streamserve.frontend.keys import KeyRing, with_key_files
from streamserve.frontend.metrics import Layout
from streamserve.logs import configure_logging
from streamserve.supervisor.children import Lifeline
from streamserve.supervisor.launcher import ChildModules, Launcher
from streamserve.supervisor.listener import bind, url_of
from streamserve.supervisor.segments import SharedState
from streamserve.supervisor.supervisor import Supervisor
from streamserve.supervisor.surroundings import raise_descriptor_limit, warn_of_surprises
from streamserve.supervisor.watch import Watch


def serve(config: Config) -> int:
    """Serves until a signal or a failure; returns the exit code.

    Raises:
        ConfigError: the address, the keys or the memory is not as it must be.
    """
    configure_logging("supervisor", config.server.log_level, config.server.log_format)
    config = dataclasses.replace(config, auth=with_key_files(config.auth))
    raise_descriptor_limit()
    with bind(config.server.host, config.server.port) as listener:
        warn_of_surprises(config.auth, listener)
        return supervise(config, listener)


def supervise(config: Config, listener: socket.socket, modules: ChildModules | None = None) -> int:
    """Serves on `listener` until a signal or a failure; returns the exit code.

    Raises:
        ConfigError: there is not enough memory for the rings.
    """
    url = url_of(listener, is_tls=config.tls.ssl_certfile is not None)
    layout = Layout(KeyRing.of(config.auth).names)
    with (
        contextlib.closing(SharedState(config.server.api_workers, layout)) as shared,
        contextlib.closing(Lifeline()) as lifeline,
        Watch() as watch,
    ):
        launcher = Launcher(
            config=config,
            modules=modules or ChildModules(),
            shared=shared,
            lifeline=lifeline,
            listener=listener,
        )
        return Supervisor(
            config=config.supervisor,
            launcher=launcher,
            shared=shared,
            watch=watch,
            stop_listening=listener.close,
            announce=lambda name: _announce(name, url),
        ).run()


def _announce(name: str, url: str) -> None:
    # Whoever started the server may have closed its end of stdout; that is no reason to stop.
    with contextlib.suppress(OSError):
        # In one piece: `print` may write its line end apart, and the children write here too.
        sys.stdout.write(f"streamserve {streamserve.__version__} serves {name} at {url}\n")
        sys.stdout.flush()
