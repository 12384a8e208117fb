"""The supervisor with real processes: fake children from the folder fakes, real pipes, signals and memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKES = Path(__file__).parent / "fakes"
# Far longer than anything here takes, so that a slow machine fails no test.
PATIENCE_S = 30.0


class Server:
    """A supervisor and its children, in a process group of their own."""

    def __init__(self, modules: list[str], num_frontends: int, limits: dict[str, float]) -> None:
        script = str(FAKES / "run_supervisor.py")
        self._process = subprocess.Popen(
            [sys.executable, script, *modules, str(num_frontends), json.dumps(limits)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{FAKES}"},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._rest = b""
        self.pid = self._process.pid
        self.lines: list[str] = []
        # role and index → pidfd, pid, number of the lifeline's descriptor
        self.children: dict[str, tuple[int, int, int]] = {}

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads output up to the first line that `pattern` is found in."""
        while True:
            line = self._read_line()
            assert line is not None, f"{pattern!r} never came:\n" + "\n".join(self.lines)
            if match := re.search(pattern, line):
                return match

    def wait_until_serving(self) -> str:
        """The address it announces."""
        return self.wait_for(r"^streamserve .* serves fake at (\S+)$")[1]

    def wait_for_end(self) -> int:
        """Reads all output, which ends when the last process has, and returns the exit code."""
        while self._read_line() is not None:
            pass
        return self._process.wait(PATIENCE_S)

    def kill(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()
        for pidfd, _, _ in self.children.values():
            os.close(pidfd)

    def _read_line(self) -> str | None:
        while b"\n" not in self._rest:
            assert select.select([self._output], [], [], PATIENCE_S)[0], "\n".join(self.lines)
            data = os.read(self._output.fileno(), 65536)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        self.lines.append(line.decode())
        if match := re.fullmatch(r"(\w+ \d+) pid (\d+) lifeline (\d+)", self.lines[-1]):
            self._meet(match[1], int(match[2]), int(match[3]))
        return self.lines[-1]

    def _meet(self, child: str, pid: int, lifeline: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            # It has ended between its line and this one.
            return
        if predecessor := self.children.get(child):
            os.close(predecessor[0])
        self.children[child] = (pidfd, pid, lifeline)


Start = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[Start]:
    servers = contextlib.ExitStack()

    def start_one(
        model: str = "steady_model",
        engine: str = "steady_engine",
        frontend: str = "steady_frontend",
        num_frontends: int = 1,
        **limits: float,
    ) -> Server:
        server = Server([model, engine, frontend], num_frontends, limits)
        servers.callback(server.close)
        return server

    with servers:
        yield start_one


def test_it_serves_and_drains_in_order(start: Start) -> None:
    server = start()
    url = server.wait_until_serving()
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", url)
    if "frontend 0 sees READY" not in server.lines:
        server.wait_for("frontend 0 sees READY")
    server.kill(signal.SIGTERM)
    assert server.wait_for_end() == 0
    said = [line for line in server.lines if line in ("frontend 0 stops", "engine stops")]
    assert said == ["frontend 0 stops", "engine stops"]
    assert any("engine: loading weights, 50%" in line for line in server.lines)
    assert not any("Warning" in line or "Traceback" in line for line in server.lines)


def test_a_child_inherits_its_own_descriptors_and_no_end_of_the_lifeline_but_one(start: Start) -> None:
    server = start(num_frontends=2)
    server.wait_until_serving()
    assert sorted(server.children) == ["engine 0", "frontend 0", "frontend 1"]
    for _, pid, lifeline in server.children.values():
        descriptors = {
            int(name): os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")
        }
        ends = [fd for fd, target in descriptors.items() if target == descriptors[lifeline]]
        assert ends == [lifeline]
        assert not any("/dev/shm" in target for target in descriptors.values())
        # Of a frontend: where it listens, the inside of its door, and the outsides of both.
        assert sum(target.startswith("socket:") for target in descriptors.values()) in (0, 4)
    # stdio, lifeline, ready pipe, model, board; then per channel two rings and a bell, and the engine's one
    # bell; a frontend has the listening socket and one channel. Each fake attaches to nothing but the board.
    engine = len(os.listdir(f"/proc/{server.children['engine 0'][1]}/fd"))
    assert engine == 3 + 4 + 2 * 3 + 1
    server.kill(signal.SIGTERM)
    assert server.wait_for_end() == 0


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the slow model waits for."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    monkeypatch.setenv("FIFO", str(path))
    return path


def test_all_start_while_the_model_is_on_its_way_and_none_serves(start: Start, fifo: Path) -> None:
    server = start(model="slow_model", startup_timeout=1.0)
    while sorted(server.children) != ["engine 0", "frontend 0"]:
        server.wait_for("pid")
    if not any("model process: fetching fake, 25%" in line for line in server.lines):
        server.wait_for("model process: fetching fake, 25%")
    fifo.write_text("go")
    server.wait_until_serving()
    server.kill(signal.SIGTERM)
    assert server.wait_for_end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_start_that_is_ended_while_the_model_is_on_its_way(
    start: Start, fifo: Path, number: signal.Signals
) -> None:
    server = start(model="slow_model")
    pidfd = os.pidfd_open(int(server.wait_for(r"model pid (\d+)")[1]))
    try:
        server.kill(number)
        assert server.wait_for_end() == (-number if number == signal.SIGKILL else 0)
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
    finally:
        os.close(pidfd)


def test_a_model_that_is_not_to_be_had_ends_the_start(start: Start) -> None:
    server = start(model="refusing_model")
    assert server.wait_for_end() == 2
    said = "streamserve: error: MODEL fake: no such path; name another"
    assert [line for line in server.lines if "error" in line] == [said]


def test_a_refusal_ends_the_start(start: Start) -> None:
    server = start(engine="refusing_engine")
    assert server.wait_for_end() == 2
    assert (
        server.lines.count(
            "streamserve: error: the engine cannot start: --dtype: float8 is unknown to this model"
        )
        == 1
    )


def test_a_death_ends_the_start(start: Start) -> None:
    server = start(engine="dying_engine")
    assert server.wait_for_end() == 1
    assert "streamserve: error: the engine exited with code 3 while starting" in server.lines


def test_a_module_that_is_missing_ends_the_start(start: Start) -> None:
    server = start(frontend="no_such_module")
    assert server.wait_for_end() == 1
    assert "streamserve: error: the frontend exited with code 1 while starting" in server.lines


def test_a_start_that_hangs_is_given_up(start: Start) -> None:
    server = start(engine="hanging_engine", startup_timeout=1.0)
    server.wait_for(
        "error: --startup-timeout: the engine was not ready in 1 s; it was at: loading weights, 25%"
    )
    server.kill(signal.SIGINT)
    assert server.wait_for_end() != 0


def test_kill_9_of_the_engine_is_followed_by_another(start: Start) -> None:
    server = start()
    server.wait_until_serving()
    for _ in range(2):
        pid = server.children["engine 0"][1]
        os.kill(pid, signal.SIGKILL)
        server.wait_for("the engine was killed by SIGKILL; its requests wait for another")
        assert int(server.wait_for(r"engine 0 pid (\d+)")[1]) != pid
        server.wait_for("engine: ready")
    server.kill(signal.SIGTERM)
    assert server.wait_for_end() == 0
    assert "engine stops" in server.lines


def test_an_engine_that_is_killed_too_often_is_told_and_is_exit_code_1(start: Start) -> None:
    server = start(max_engine_restarts=1, engine_failure_grace=0.2)
    server.wait_until_serving()
    for _ in range(2):
        os.kill(server.children["engine 0"][1], signal.SIGKILL)
        if "; its requests wait" in server.wait_for("the engine was killed by SIGKILL").string:
            server.wait_for(r"engine 0 pid (\d+)")
    said = "the engine was killed by SIGKILL, after 1 restarts in a row (--max-engine-restarts)"
    assert f"streamserve: error: {said}" in server.lines
    if "frontend 0 sees DEAD" not in server.lines:
        server.wait_for("frontend 0 sees DEAD")
    assert server.wait_for_end() == 1
    assert server.lines[-1] == "frontend 0 stops"


def test_kill_9_of_a_frontend_is_followed_by_another_on_its_channel(start: Start) -> None:
    server = start(num_frontends=2)
    server.wait_until_serving()
    first, second = (server.children[f"frontend {index}"][1] for index in (0, 1))
    os.kill(first, signal.SIGKILL)
    server.wait_for("the frontend 0 was killed by SIGKILL; its streams are lost")
    assert int(server.wait_for(r"frontend 0 pid (\d+)")[1]) != first
    server.wait_for("frontend 0 sees READY")
    assert server.children["frontend 1"][1] == second
    server.kill(signal.SIGTERM)
    assert server.wait_for_end() == 0
    stopped = [line for line in server.lines if line.endswith("stops")]
    assert sorted(stopped) == ["engine stops", "frontend 0 stops", "frontend 1 stops"]


def test_a_frontend_that_does_not_live_ends_the_server(start: Start) -> None:
    server = start(frontend="mortal_frontend", max_frontend_restarts=2)
    port = int(server.wait_until_serving().rpartition(":")[2])
    for life in range(3):
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S):
            server.wait_for(f"life {life}")
    assert server.wait_for_end() == 1
    said = "the frontend exited with code 7, after 2 restarts in a row (--max-frontend-restarts)"
    assert f"streamserve: error: {said}" in server.lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_is_one_graceful_stop(start: Start, number: int) -> None:
    server = start(num_frontends=2)
    server.wait_until_serving()
    os.killpg(server.pid, number)
    assert server.wait_for_end() == 0
    assert [line for line in server.lines if line.endswith("stops")][-1] == "engine stops"


def test_a_second_signal_does_not_wait_for_streams(start: Start) -> None:
    server = start(frontend="stubborn_frontend", drain_timeout=1e9)
    server.wait_until_serving()
    server.kill(signal.SIGTERM)
    server.wait_for("frontend 0 sees DRAINING")
    server.kill(signal.SIGTERM)
    assert server.wait_for_end() == 128 + signal.SIGTERM


def test_no_child_outlives_kill_9_of_the_supervisor(start: Start) -> None:
    server = start(engine="busy_engine", frontend="stubborn_frontend")
    server.wait_until_serving()
    began = time.monotonic()
    server.kill(signal.SIGKILL)
    for pidfd, _, _ in server.children.values():
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
    assert time.monotonic() - began < 5


def test_it_imports_neither_torch_nor_asyncio() -> None:
    code = (
        "import sys, streamserve.cli, streamserve.supervisor\n"
        "print([name for name in ('torch', 'asyncio', 'starlette', 'transformers') if name in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert output == "[]\n"
