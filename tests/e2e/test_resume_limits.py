"""How long streams without a connection go on, what they may take, and how they end."""

from __future__ import annotations

import contextlib
import re
import signal
import time
import uuid

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from raw_http import num_unsent, request, unread
from resuming import Refusal, create, objects_of, resume, take
from server import RunningServer, load, running_server, wait_idle, wait_until
from ways_in import CHAT, COMPLETION, PATHS, RESPONSE, prompt, tell

PATIENCE_S = 300.0
LONG = {"model": "tiny", "max_tokens": 20_000, "ignore_eos": True, "seed": 3}
ARGUMENTS = ("--dtype=float32", "--served-model-name=tiny", "--num-gpu-blocks-override=5000")


@pytest.fixture
def start(tiny_model):
    with contextlib.ExitStack() as servers:

        def start_one(*arguments):
            server = RunningServer(str(tiny_model), *ARGUMENTS, *arguments, env={"OMP_NUM_THREADS": "1"})
            servers.callback(server.stop, signal.SIGKILL)
            return server.wait_ready()

        yield start_one


@pytest.fixture(scope="module")
def strict_server(tiny_model):
    """A server with a short window, little memory, and no patience with those who do not read."""
    with running_server(
        str(tiny_model),
        *ARGUMENTS,
        "--resume-window=2",
        "--resume-buffer-bytes=512K",
        "--stream-write-timeout=1",
        env={"OMP_NUM_THREADS": "1"},
    ) as server:
        yield server


def fresh():
    return uuid.uuid4().hex


def metric(server, name):
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


@pytest.mark.parametrize("over", ["sse", "socket"])
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION, RESPONSE])
def test_who_does_not_come_back_in_time_is_too_late(strict_server, endpoint, over):
    server, name = strict_server, fresh()
    expired = metric(server, "streamserve:streams_expired_total")
    take(create(server.url, endpoint, {**LONG, **prompt(endpoint, "hello")}, name, over=over), 2)
    assert load(server)["running"] == 1
    wait_until(lambda: metric(server, "streamserve:streams_expired_total") == expired + 1, "it has expired")
    wait_idle(server)
    assert metric(server, "streamserve:streams_detached") == 0
    with pytest.raises(Refusal) as refused:
        resume(server.url, endpoint, name, 2, over=over)
    assert (refused.value.status, refused.value.code) == (404, "stream_not_found")


def test_a_client_that_does_not_read_loses_its_connection_and_not_its_stream(start):
    # Room for all that it misses, which is more than the kernel takes in for it.
    server, name = start("--stream-write-timeout=1", "--resume-buffer-bytes=400M"), fresh()
    body = {**LONG, "max_tokens": 6000, "prompt": "hello", "stream": True, "logprobs": 20}
    sent = request(PATHS[COMPLETION], body, x_stream_resume="1", x_request_id=name)
    path = f"{server.url}/v1/streams/cmpl-{name}"

    def status():
        answer = httpx.get(path, timeout=PATIENCE_S)
        return answer.json()["status"] if answer.status_code == 200 else "gone"

    with unread(server.url, sent) as connection:
        wait_until(lambda: num_unsent(connection) > 0, "the client is behind")
        wait_until(lambda: status() == "detached", "the connection is dropped")
        events = take(resume(server.url, COMPLETION, name, 0))
    (choice,) = tell(COMPLETION, objects_of(COMPLETION, events), body).choices.values()
    assert len(choice.tokens) == 6000
    wait_idle(server)


def test_a_long_stream_forgets_its_beginning(strict_server):
    server, name = strict_server, fresh()
    body = {**LONG, "prompt": "hello"}
    events = take(create(server.url, COMPLETION, body, name), 1500)
    for over in ("sse", "socket"):
        with pytest.raises(Refusal) as refused:
            resume(server.url, COMPLETION, name, 1, over=over)
        assert (refused.value.status, refused.value.code) == (410, "events_gone")
    assert metric(server, "streamserve:resume_buffer_bytes") <= 512 * 1024
    # What it holds is enough for who was there to the last.
    events += take(resume(server.url, COMPLETION, name, 1500), 100)
    assert [event.number for event in events] == list(range(1, 1601))
    httpx.delete(f"{server.url}/v1/streams/cmpl-{name}", timeout=PATIENCE_S)
    wait_idle(server)


def test_many_streams_without_connections_take_no_more_than_they_may(strict_server):
    server = strict_server
    with contextlib.ExitStack() as connections:
        for number in range(60):
            body = {**LONG, "max_tokens": 200, "prompt": f"hello {number}", "stream": True}
            sent = request(PATHS[COMPLETION], body, x_stream_resume="1", x_request_id=fresh())
            connections.enter_context(unread(server.url, sent))
            connections.close() if number % 7 == 0 else None
            assert metric(server, "streamserve:resume_buffer_bytes") <= 2 * 512 * 1024
    wait_until(lambda: metric(server, "streamserve:streams_open") == 0, "all have ended")
    wait_until(lambda: metric(server, "streamserve:resume_buffer_bytes") == 0, "all are forgotten")
    wait_idle(server)


def test_without_a_window_nothing_is_kept(start):
    server = start("--resume-window=0")
    body = {**LONG, "prompt": "hello", "stream": True, "stream_options": {"resumable": True}}
    ask = {"x-stream-resume": "1", "x-request-id": "one"}
    with httpx.stream(
        "POST", server.url + PATHS[COMPLETION], json=body, headers=ask, timeout=PATIENCE_S
    ) as answer:
        assert "x-stream-id" not in answer.headers
        assert next(answer.iter_lines()).startswith("data: ")
    wait_idle(server)


def test_a_stopping_server_waits_for_no_one_longer_than_the_window(start):
    server, body = start("--resume-window=1", "--drain-timeout=200"), {**LONG, "prompt": "hello"}
    take(create(server.url, COMPLETION, body, fresh()), 2)
    began_s = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began_s < 150
    assert "Traceback" not in server.output


def test_who_comes_back_to_a_stopping_server_gets_the_rest(start):
    server, name = start("--resume-window=200", "--drain-timeout=200"), fresh()
    body = {**LONG, "prompt": "hello", "max_tokens": 3000}
    events = take(create(server.url, COMPLETION, body, name), 2)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, "it is stopping")
    events += take(resume(server.url, COMPLETION, name, 2))
    (choice,) = tell(COMPLETION, objects_of(COMPLETION, events), body).choices.values()
    assert choice.reason == "length"
    assert server.process.wait(PATIENCE_S) == 0


def test_the_end_of_the_drain_ends_what_nobody_reads(start):
    server = start("--resume-window=200", "--drain-timeout=1")
    for name in ("one", "two"):
        take(create(server.url, COMPLETION, {**LONG, "prompt": "hello"}, name), 2)
    reading = create(server.url, COMPLETION, {**LONG, "prompt": "hello"}, "three")
    beginning = iter(reading)
    next(beginning)
    server.process.send_signal(signal.SIGTERM)
    events = list(beginning)
    assert events[-1].data["error"]["code"] == "engine_unavailable"
    assert server.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in server.output


def test_the_streams_of_a_frontend_that_dies_are_gone(start):
    server = start("--api-workers=2", "--max-frontend-restarts=20")
    names = [fresh() for _ in range(4)]
    for name in names:
        take(create(server.url, COMPLETION, {**LONG, "prompt": "hello"}, name), 2)
    victim = _frontends(server)[0]
    victim.kill()
    victim.wait(PATIENCE_S)
    wait_until(lambda: len(re.findall(r"frontend \d: ready", server.output)) == 3, "another one is ready")
    # Each stream is there for every frontend, or for none.
    for name in names:
        outcomes = {outcome_of(server, name) for _ in range(4)}
        assert outcomes in ({"there"}, {"stream_not_found"})
    # And streams of the new process are found by the other, as before.
    for _ in range(6):
        name = fresh()
        events = take(create(server.url, COMPLETION, {**LONG, "max_tokens": 50, "prompt": "a"}, name), 3)
        events += take(resume(server.url, COMPLETION, name, 3))
        assert objects_of(COMPLETION, events)


def outcome_of(server, name):
    try:
        take(resume(server.url, COMPLETION, name, 2), 1)
    except Refusal as refused:
        return refused.code
    return "there"


def _frontends(server):
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "streamserve.frontend.process" in child.cmdline()]
