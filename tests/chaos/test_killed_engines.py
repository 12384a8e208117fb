"""Engines killed with -9: clients see a pause, and then the same answer as if nothing had happened."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
from typing import Any

import httpx
import numpy as np
import pytest
from server import PATIENCE_S, RunningServer, wait_idle, wait_until
from ways_in import ALL_WAYS, CHAT, COMPLETION, HTTP, SSE, Heard, ask, prompt

ARGUMENTS = (
    "--dtype=float32",
    "--served-model-name=tiny",
    "--num-gpu-blocks-override=5000",
    "--max-num-seqs=24",
)
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
# Long enough to be under way for a while.
LONG: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server(tiny_model):
    arguments = (*ARGUMENTS, "--max-engine-restarts=100")
    server = RunningServer(str(tiny_model), *arguments, env={"OMP_NUM_THREADS": "1"})
    yield server.wait_ready()
    server.stop(signal.SIGKILL)


def engines(server: RunningServer) -> int:
    """How many there were that became ready."""
    return server.output.count("engine: ready")


def running(server: RunningServer) -> int:
    """Requests that the engine runs; 0 while there is none."""
    answer = httpx.get(f"{server.url}/load", timeout=PATIENCE_S)
    return answer.json()["running"] if answer.status_code == 200 else 0


def kill_engine(server: RunningServer) -> None:
    server.engine.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def asking(server: RunningServer, asked: list[tuple[str, str, dict[str, Any]]]):
    """All at once; gives their answers to come."""
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        yield [
            pool.submit(ask, server.url, endpoint, transport, {**LONG, **body})
            for endpoint, transport, body in asked
        ]


def told(heard: Heard) -> dict[str, Any]:
    """All of an answer that must not change."""
    usage = heard.usage and {name: heard.usage[name] for name in ("prompt_tokens", "completion_tokens")}
    return {
        "usage": usage,
        "choices": [
            (said.text, said.reason, said.stop_reason, said.tokens, said.offsets)
            for _, said in sorted(heard.choices.items())
        ],
    }


def assert_same(found: Heard, wanted: Heard) -> None:
    assert told(found) == told(wanted)
    for index, said in wanted.choices.items():
        values = [
            np.array([np.nan if one is None else one for one in each.logprobs])
            for each in (found.choices[index], said)
        ]
        np.testing.assert_allclose(*values, rtol=1e-3, atol=1e-4)


def test_all_answers_go_on(server):
    asked = [
        *(
            (*way, {**prompt(way[0], f"Way {at}"), **(SEEDED if at % 2 else GREEDY)})
            for at, way in enumerate(ALL_WAYS * 2)
        ),
        (COMPLETION, SSE, {"prompt": "Twice", "n": 2, **SEEDED, **USAGE}),
        (CHAT, HTTP, {**prompt(CHAT, "Twice"), "n": 2, **SEEDED}),
        (COMPLETION, SSE, {"prompt": "Odds", "logprobs": 3, **SEEDED, **USAGE}),
        (CHAT, HTTP, {**prompt(CHAT, "Odds"), "logprobs": True, "top_logprobs": 2, **GREEDY}),
        (
            COMPLETION,
            SSE,
            {
                "prompt": "Penalties",
                "frequency_penalty": 0.4,
                "presence_penalty": 0.3,
                "repetition_penalty": 1.1,
                **SEEDED,
                **USAGE,
            },
        ),
        (COMPLETION, HTTP, {"prompt": "Echo of a prompt", "echo": True, "logprobs": 1, **GREEDY}),
        (COMPLETION, SSE, {"prompt": "At least", "min_tokens": 380, "ignore_eos": False, **SEEDED, **USAGE}),
    ]
    with asking(server, asked) as futures:
        wanted = [future.result() for future in futures]
    before = engines(server)
    with asking(server, asked) as futures:
        for count in range(2):
            wait_until(lambda: running(server) >= 20, "most run")
            kill_engine(server)
            wait_until(lambda: engines(server) == before + count + 1, "another is there")
        found = [future.result() for future in futures]
    for (endpoint, transport, body), one, other in zip(asked, found, wanted, strict=True):
        assert_same(one, other)
    wait_idle(server)
