"""A real server in processes of its own, for the tests that go through its public door."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
# Generous: a loaded machine may take minutes for what takes seconds on a quiet one.
PATIENCE_S = 300.0


class RunningServer:
    """`streamserve serve …` as a child process, stopped by its own pid.

    Args:
        arguments: of the command.
        env: variables to set besides those of the tests.
        has_own_group: all its processes are a group of their own, which can be sent a signal at once.
        program: what Python is to run.
    """

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        has_own_group: bool = False,
        program: tuple[str, ...] = ("-m", "streamserve", "serve"),
    ) -> None:
        command = [sys.executable, *program, *arguments, "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=has_own_group,
        )
        self.url = ""
        self._lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found and not self.url:
                self.url = found[0]
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        """What the server printed so far."""
        return "".join(self._lines)

    def wait_ready(self) -> RunningServer:
        """Blocks until the server printed its URL; fails with its output if it ended instead."""
        if not self._ready.wait(PATIENCE_S) or not self.url:
            self.stop()
            raise AssertionError(f"the server did not start:\n{self.output}")
        return self

    def child(self, module: str) -> psutil.Process:
        """The child process that runs `module`, as `ps` would show it."""
        for process in psutil.Process(self.process.pid).children():
            if module in process.cmdline():
                return process
        raise AssertionError(f"no child runs {module}")

    @property
    def engine(self) -> psutil.Process:
        """The EngineCore process."""
        return self.child("streamserve.engine.process")

    @property
    def frontend(self) -> psutil.Process:
        """The frontend process."""
        return self.child("streamserve.frontend.process")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the server and returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


@contextlib.contextmanager
def running_server(*arguments: str, env: dict[str, str] | None = None) -> Iterator[RunningServer]:
    """A server that is ready on entry and gone on exit."""
    server = RunningServer(*arguments, env=env)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def wait_until(condition: Any, what: str, timeout_s: float = PATIENCE_S) -> None:
    """Polls until `condition()` holds; for events that another process gives no handle on."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain until {what}")
        time.sleep(0.02)


def sse_events(response: httpx.Response) -> Iterator[str]:
    """The `data` of each event of a streamed answer."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def load(server: RunningServer) -> dict[str, Any]:
    """What the engine says of itself, as of now."""
    return httpx.get(f"{server.url}/load", timeout=PATIENCE_S).raise_for_status().json()


def wait_idle(server: RunningServer) -> None:
    """Waits until nothing runs, nothing waits and all KV blocks are back."""

    def is_idle() -> bool:
        now = load(server)
        return now["running"] == now["waiting"] == 0 and now["free_blocks"] == now["num_blocks"]

    wait_until(is_idle, "the engine is idle")
