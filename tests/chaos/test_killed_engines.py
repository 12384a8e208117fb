"""Engines killed with -9: clients see a pause, and then the same answer as if nothing had happened."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from resuming import create, objects_of, resume, take
from server import PATIENCE_S, ROOT, RunningServer, sse_events, wait_idle, wait_until
from ways_in import ALL_WAYS, CHAT, COMPLETION, HTTP, SSE, Heard, Refused, ask, prompt, tell
from websockets.sync.client import connect

PROGRAMS = Path(__file__).parent / "programs"
ARGUMENTS = ("--dtype=float32", "--served-model-name=tiny", "--num-gpu-blocks-override=5000")
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
# Under way for a while.
LONG: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "ignore_eos": True}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1}

Asked = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def server(tiny_model):
    """Some of the requests of a test have to wait for a place."""
    arguments = (*ARGUMENTS, "--max-engine-restarts=100", "--max-num-seqs=20", "--api-workers=2")
    server = RunningServer(str(tiny_model), *arguments, env={"OMP_NUM_THREADS": "1"})
    yield server.wait_ready()
    server.stop(signal.SIGKILL)


def num_engines(server: RunningServer) -> int:
    """How many there were that became ready."""
    return server.output.count("engine: ready")


def num_running(server: RunningServer) -> int:
    """Requests that the engine runs; 0 while there is none."""
    answer = httpx.get(f"{server.url}/load", timeout=PATIENCE_S)
    return answer.json()["running"] if answer.status_code == 200 else 0


def numbers(server: RunningServer) -> dict[str, float]:
    """The metrics without labels, or with those of the model."""
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        sample.name: sample.value for sample in samples if sample.labels.keys() <= {"model_name", "engine"}
    }


def num_generated(server: RunningServer) -> float:
    return numbers(server)["vllm:generation_tokens_total"]


def wait_for_engine(server: RunningServer, count: int) -> None:
    wait_until(lambda: num_engines(server) == count, f"engine number {count} is there")


def status_of(server: RunningServer) -> str:
    return httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).json()["status"]


def kill_what_loads(server: RunningServer) -> None:
    """Kills the engine that is not ready yet."""
    count = num_engines(server)

    def is_there() -> bool:
        with contextlib.suppress(AssertionError):
            server.engine.kill()
            return True
        return False

    wait_until(is_there, "another engine is there")
    assert num_engines(server) == count


@contextlib.contextmanager
def asking(server: RunningServer, asked: list[Asked]):
    """All at once; gives their answers to come."""
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        yield [
            pool.submit(ask, server.url, endpoint, transport, {**LONG, **body})
            for endpoint, transport, body in asked
        ]


def own_mode(server: RunningServer) -> str:
    """The text of a response over OpenAI's own WebSocket mode."""
    with connect(server.url.replace("http", "ws", 1) + "/v1/responses", max_size=None) as client:
        create = {"type": "response.create", "input": "Own", "model": "tiny", "max_output_tokens": 400}
        client.send(json.dumps({**create, "ignore_eos": True, **SEEDED}))
        text = ""
        while (event := json.loads(client.recv(PATIENCE_S)))["type"] != "response.incomplete":
            text += event["delta"] if event["type"] == "response.output_text.delta" else ""
        return text


def told(heard: Heard) -> Any:
    """All of an answer that must be the same."""
    usage = heard.usage and [heard.usage[name] for name in ("prompt_tokens", "completion_tokens")]
    choices = [
        (index, said.text, said.reason, said.stop_reason, said.tokens, said.offsets)
        for index, said in sorted(heard.choices.items())
    ]
    return usage, choices


def assert_same(found: Heard, wanted: Heard) -> None:
    assert told(found) == told(wanted)
    for index, said in wanted.choices.items():
        # K and V of tokens that are read at once may differ in the last bit from those of one by one.
        values = [np.array(each.logprobs, dtype=float) for each in (found.choices[index], said)]
        np.testing.assert_allclose(*values, rtol=1e-3, atol=1e-4)


def test_all_answers_go_on(server):
    asked: list[Asked] = [
        *(
            (*way, {**prompt(way[0], f"Way {at}"), **(SEEDED if at % 2 else GREEDY)})
            for at, way in enumerate(ALL_WAYS * 2)
        ),
        (COMPLETION, SSE, {"prompt": "Twice", "n": 2, **SEEDED, **USAGE}),
        (CHAT, HTTP, {**prompt(CHAT, "Twice"), "n": 2, **SEEDED}),
        (COMPLETION, SSE, {"prompt": "Odds", "logprobs": 3, **SEEDED, **USAGE}),
        (CHAT, HTTP, {**prompt(CHAT, "Odds"), "logprobs": True, "top_logprobs": 2, **GREEDY}),
        (COMPLETION, SSE, {"prompt": "Penalties", **PENALTIES, **SEEDED, **USAGE}),
        (COMPLETION, HTTP, {"prompt": "Echo of a prompt", "echo": True, "logprobs": 1, **GREEDY}),
        (COMPLETION, SSE, {"prompt": "At least", "min_tokens": 380, "ignore_eos": False, **SEEDED, **USAGE}),
        (COMPLETION, HTTP, {"prompt": "Words", "bad_words": ["the"], "logit_bias": {"300": 4}, **SEEDED}),
    ]
    stop = (COMPLETION, SSE, {"prompt": "Until", **SEEDED, **USAGE})
    with asking(server, [*asked, stop]) as futures:
        own = own_mode(server)
        *wanted, unstopped = [future.result() for future in futures]
    # It comes late enough for the engine to die before.
    end = unstopped.text[-40:-30]
    with asking(server, [(*stop[:2], {**stop[2], "stop": end})]) as (future,):
        wanted.append(future.result())
    assert wanted[-1].only.stop_reason == end
    asked.append((*stop[:2], {**stop[2], "stop": end}))
    count = num_engines(server)
    with asking(server, asked) as futures, concurrent.futures.ThreadPoolExecutor(1) as pool:
        own_future = pool.submit(own_mode, server)
        for number in (1, 2):
            wait_until(lambda: num_running(server) == 20, "as many run as can, and the others wait")
            server.engine.kill()
            wait_for_engine(server, count + number)
        found = [future.result() for future in futures]
        assert own_future.result() == own
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)
    wait_idle(server)


def test_while_there_is_no_engine_streams_are_kept_and_requests_wait(server):
    body = {**LONG, "max_tokens": 3000, **SEEDED}
    kept = ask(server.url, COMPLETION, SSE, {**body, "prompt": "Kept"})
    short = (COMPLETION, SSE, {"prompt": "Short", "max_tokens": 30, **GREEDY})
    with asking(server, [short]) as (future,):
        wanted = future.result()
    count = num_engines(server)
    events = take(create(server.url, COMPLETION, {**body, "prompt": "Kept"}, "kept"), 5)
    server.engine.kill()
    wait_until(lambda: status_of(server) == "restarting", "it is noticed")
    kill_what_loads(server)
    with asking(server, [short] * 6) as futures:
        # Two frontends: the one that is asked need not be the one that has it.
        events += take(resume(server.url, COMPLETION, "kept", events[-1].number), 5)
        for future in futures:
            assert_same(future.result(), wanted)
        assert num_engines(server) == count + 1
    events += take(resume(server.url, COMPLETION, "kept", events[-1].number))
    assert told(tell(COMPLETION, objects_of(COMPLETION, events), body)) == told(kept)
    values = numbers(server)
    assert values["streamserve:engine_up"] == 1
    # That one came to nothing.
    assert values["streamserve:engine_restarts_total"] == num_engines(server) - 1 + 1
    assert values["streamserve:requests_continued_total"] >= 20 + 20 + 1
    assert values["streamserve:requests_poisonous_total"] == 0
    wait_idle(server)


@pytest.mark.heavy
def test_engines_killed_again_and_again_under_load(server):
    kinds = [
        *((*way, {**prompt(way[0], "Load"), **SEEDED}) for way in ALL_WAYS),
        (COMPLETION, SSE, {"prompt": "Load", "n": 3, "logprobs": 2, **SEEDED, **USAGE}),
        (COMPLETION, SSE, {"prompt": "Load " * 300, **PENALTIES, **GREEDY, **USAGE}),
    ]
    bodies = [
        (endpoint, transport, {**body, "max_tokens": most})
        for endpoint, transport, body in kinds
        for most in (40, 600)
    ]
    with asking(server, bodies) as futures:
        wanted = [future.result() for future in futures]
    stop = threading.Event()

    def go_on_asking(number: int) -> int:
        num_asked = 0
        while not stop.is_set():
            at = (number + num_asked) % len(bodies)
            endpoint, transport, body = bodies[at]
            assert_same(ask(server.url, endpoint, transport, {**LONG, **body}), wanted[at])
            num_asked += 1
        return num_asked

    randomness = random.Random(3)
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        clients = [pool.submit(go_on_asking, number) for number in range(40)]
        try:
            for number in range(10):
                count, before = num_engines(server), num_generated(server)
                # Long enough to be no suspect: these kills mean nobody.
                wait_until(lambda: num_generated(server) > before + 3000, "they get ahead")  # noqa: B023
                time.sleep(randomness.uniform(0, 0.5))
                server.engine.kill()
                if number % 3 == 0:
                    kill_what_loads(server)
                wait_for_engine(server, count + 1)
        finally:
            stop.set()
        assert all(client.result() for client in clients)
    wait_idle(server)


def test_a_server_that_is_stopping_finishes_its_streams_with_another_engine(server):
    request = {**LONG, "prompt": "Last", "max_tokens": 1000, **GREEDY, "stream": True}
    url = f"{server.url}/v1/completions"
    texts = []
    for is_last in (False, True):
        with (
            httpx.Client(timeout=PATIENCE_S) as client,
            client.stream("POST", url, json=request) as response,
        ):
            events = sse_events(response)
            heard = [next(events)]
            if is_last:
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: "open streams may take" in server.output, "it stops")
                server.engine.kill()
            heard += events
        assert heard.pop() == "[DONE]"
        texts.append("".join(json.loads(event)["choices"][0]["text"] for event in heard))
    assert texts[0] == texts[1]
    assert server.process.wait(PATIENCE_S) == 0


def test_one_request_that_engines_die_of_is_failed_and_the_others_go_on(tiny_model):
    server = RunningServer(
        str(tiny_model),
        *ARGUMENTS,
        env={
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{PROGRAMS}",
            "DEADLY_PROMPT": "7,77,177",
        },
        program=(str(PROGRAMS / "serve_mortal.py"),),
    ).wait_ready()
    innocent = [(COMPLETION, SSE, {"prompt": f"Number {number}", **SEEDED}) for number in range(8)]
    try:
        with asking(server, innocent) as futures:
            wanted = [future.result() for future in futures]
        with asking(server, innocent) as futures:
            with pytest.raises(Refused) as refused:
                ask(server.url, COMPLETION, HTTP, {**LONG, "prompt": [7, 77, 177]})
            found = [future.result() for future in futures]
        assert (refused.value.status, refused.value.error["code"]) == (500, "request_failed")
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
        assert num_engines(server) == 4
        wait_idle(server)
        assert server.stop() == 0
        assert "engines died of a request, which is failed: 3 prompt tokens" in server.output
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)
