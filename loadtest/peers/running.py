"""A server that is started, waited for and stopped, and how long that takes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loadtest.peers.connection import HOST
from loadtest.peers.models import ServedModel
from loadtest.peers.process_tree import ProcessTree, still_running
from loadtest.peers.servers import COMPLETIONS, Peer
from loadtest.peers.workload import Limits

READY_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 40.0
# How often a server that is not ready is asked: small beside any start, and cheap.
_POLL_S = 0.02


class ServerFailed(Exception):
    """The server ended or did not become ready; the text holds the end of what it printed."""


class RunningServer:
    """A server in a session of its own, stopped by its pid when the `with` block ends.

    Args:
        peer: which server.
        model: what it serves.
        limits: what it gets to work with.
        log: file for what it prints.

    Attributes:
        port: where it listens on 127.0.0.1.
        tree: its processes.
        ready_s: from the command to the first 200 of its health path.
        first_token_s: from the command to the first text of the first answer.
    """

    def __init__(self, peer: Peer, model: ServedModel, limits: Limits, log: Path) -> None:
        self.peer, self.model = peer, model
        self.port = free_port()
        self.ready_s = self.first_token_s = 0.0
        self._log = log
        command = peer.command(model, limits, self.port)
        environment = {**os.environ, **peer.environment(limits)}
        with log.open("ab") as output:
            self._began = time.perf_counter()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.tree = ProcessTree(self._process.pid)

    def __enter__(self) -> Self:
        try:
            self._wait_ready()
            self._ask_first()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Asks it to end, and ends what is left of it after a while."""
        # Those in a session of their own are not found any more once their parent has ended.
        members = self.tree.members()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while (left := still_running([*members, *self.tree.members()])) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        self._process.wait()

    def _wait_ready(self) -> None:
        while not self._is_ready():
            if self._process.poll() is not None:
                raise self._failure(f"ended with {self._process.returncode}")
            if time.perf_counter() - self._began > READY_TIMEOUT_S:
                raise self._failure(f"was not ready after {READY_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
        self.ready_s = time.perf_counter() - self._began

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10.0)
        try:
            connection.request("GET", self.peer.health)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _ask_first(self) -> None:
        body = self.peer.body(self.model, "The", 4)
        connection = http.client.HTTPConnection(HOST, self.port, timeout=READY_TIMEOUT_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", COMPLETIONS, json.dumps(body), headers)
            response = connection.getresponse()
            for line in response:
                if response.status == 200 and _has_text(line):
                    self.first_token_s = time.perf_counter() - self._began
                    # The rest is read, so that the answer is not cut off.
                    response.read()
                    return
            raise self._failure(f"gave no text to its first request (HTTP {response.status})")
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(f"did not answer its first request ({error})") from error
        finally:
            connection.close()

    def _failure(self, what: str) -> ServerFailed:
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return ServerFailed("\n    ".join([f"{self.peer.name} {what}; it printed:", *lines]))


def free_port() -> int:
    """A TCP port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def _has_text(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return any(choice.get("text") for choice in event.get("choices", ()))
