"""A whole server with many streams at once."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from loadtest.gpu_check.model_folder import prompt_of, write_served
from loadtest.gpu_check.results import Record
from loadtest.gpu_check.setting import Setting
from loadtest.peers.client import Job, Outcome
from loadtest.peers.connection import HOST

_READY_TIMEOUT_S = 120.0
_POLL_S = 0.05
_MODEL = "dummy"
_ROUNDS = ("warm-up", "1", "2")


def run(setting: Setting, record: Record, shared: dict[str, Any]) -> None:
    """See `SectionModule.run`."""
    folder = write_served(setting.folder / "models" / "served", setting.large)
    table = record.table(
        f"{setting.streams} streams, prompts of {setting.prompt_tokens}, answers of {setting.max_tokens}",
        *("round", "tokens/s", "first token ms", "seconds"),
    )
    with _server(setting, folder) as (port, ready_s):
        record.note(f"ready {ready_s:.1f} s after its command")
        # The first round is the warm-up: kernels are compiled, graphs captured.
        for round_name in _ROUNDS:
            outcome, seconds = _ask(setting, port, round_name)
            problems = {answer.problem for answer in outcome.answers if answer.problem}
            record.check(
                f"round {round_name}: all answers are whole", not problems, "; ".join(sorted(problems))
            )
            if problems:
                break
            tokens = sum(answer.output_tokens for answer in outcome.answers)
            firsts = sorted(answer.ttft for answer in outcome.answers)
            median_ms = firsts[len(firsts) // 2] * 1e3
            record.row(table, round_name, round(tokens / seconds), median_ms, seconds)
        for line in _metrics(port):
            record.note(line)


def _command(setting: Setting, folder: Path, port: int) -> list[str]:
    options = {
        "--host": HOST,
        "--port": port,
        "--served-model-name": _MODEL,
        "--load-format": "dummy",
        "--dtype": setting.dtype,
        "--device": setting.device,
        "--seed": 0,
        "--max-model-len": setting.max_model_len,
        "--max-num-seqs": setting.streams,
        "--cudagraph-capture-sizes": ",".join(map(str, setting.graph_sizes)),
    }
    if setting.is_rehearsal:
        options |= {"--num-gpu-blocks-override": 200, "--cudagraph-mode": "FULL_AND_PIECEWISE"}
    words = [f"{name}={value}" for name, value in options.items()]
    # Graphs are captured before it is ready, so that no round runs into them.
    return [sys.executable, "-m", "streamserve", "serve", str(folder), *words, "--no-lazy-graphs"]


@contextmanager
def _server(setting: Setting, folder: Path) -> Iterator[tuple[int, float]]:
    """Its port, and seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    began = time.monotonic()
    with (setting.folder / "logs" / "served.txt").open("wb") as log:
        process = subprocess.Popen(
            _command(setting, folder, port), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait_ready(process, port)
        yield port, time.monotonic() - began
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see logs/served.txt")
        try:
            if _get(port, "/ready")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(_POLL_S)
    raise RuntimeError("the server is not ready; see logs/served.txt")


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def _ask(setting: Setting, port: int, round_name: str) -> tuple[Outcome, float]:
    """One round from a client in a process of its own; seconds from the first request to the last answer."""
    # Prompts that no round before has put into the prefix cache.
    first = _ROUNDS.index(round_name) * setting.streams
    bodies = tuple(_body(setting, first + stream) for stream in range(setting.streams))
    job = Job(port, "/v1/completions", bodies, setting.max_tokens, setting.streams, _READY_TIMEOUT_S)
    client = subprocess.Popen(
        [sys.executable, "-m", "loadtest.peers.client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    with client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(job.to_line())
        client.stdin.flush()
        client.stdout.readline()
        client.stdin.write("\n")
        client.stdin.flush()
        began = time.perf_counter()
        client.stdout.readline()
        seconds = time.perf_counter() - began
        return Outcome.from_line(client.stdout.readline()), seconds


def _body(setting: Setting, stream: int) -> str:
    request = {
        "model": _MODEL,
        "prompt": prompt_of(stream, setting.prompt_tokens, setting.large["vocab_size"]),
        "max_tokens": setting.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return orjson.dumps(request).decode()


def _metrics(port: int) -> list[str]:
    """What /metrics says of graphs and of gaps between steps."""
    wanted = ("graph", "gap", "gpu_memory")
    lines = _get(port, "/metrics")[1].splitlines()
    return [line for line in lines if not line.startswith("#") and any(word in line for word in wanted)]
