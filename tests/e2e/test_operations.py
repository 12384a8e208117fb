"""Keys, two frontends on one port, one view of them, and the way out: on a server of its own."""

from __future__ import annotations

import json
import os
import signal
import threading

import httpx
import psutil
import pytest
from openai import AuthenticationError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from server import RunningServer, running_server, sse_events, wait_until

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def team_server(tiny_model, tmp_path_factory):
    """A server for Alice, Bob and an administrator, with two frontends."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice:sk-alice\nbob:sk-bob\n")
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=2000",
        "--max-num-seqs=8",
        "--api-workers=2",
        f"--api-key-file={keys}",
        "--log-format=json",
        env={"OMP_NUM_THREADS": "1", "STREAMSERVE_ADMIN_KEY": "root:sk-root"},
    ) as server:
        yield server


def key(name):
    return {"Authorization": f"Bearer sk-{name}"}


def frontends(server):
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "streamserve.frontend.process" in child.cmdline()]


def body(max_tokens, **more):
    return {
        "model": "tiny",
        "prompt": "count",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }


def samples(server):
    response = httpx.get(f"{server.url}/metrics", headers=key("root"), timeout=300)
    assert response.status_code == 200, response.text
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            inside = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
    return found


def test_every_route_but_the_probes_wants_a_key(team_server):
    for path in ("/health", "/live", "/ready", "/ping"):
        assert httpx.get(team_server.url + path, timeout=300).status_code == 200
    for path in (
        "/v1/models",
        "/metrics",
        "/load",
        "/version",
        "/v1/streams",
        "/openapi.json",
        "/docs",
        "/x",
    ):
        refused = httpx.get(team_server.url + path, timeout=300)
        assert refused.status_code == 401, path
        assert refused.json()["error"]["type"] == "authentication_error"


def test_openais_client_gets_in_with_a_key_and_only_with_one(team_server):
    with OpenAI(base_url=f"{team_server.url}/v1", api_key="sk-alice", max_retries=0) as client:
        answer = client.completions.create(model="tiny", prompt="count", max_tokens=3)
    assert answer._request_id
    assert answer.id == f"cmpl-{answer._request_id}"
    with (
        OpenAI(base_url=f"{team_server.url}/v1", api_key="sk-mallory", max_retries=0) as stranger,
        pytest.raises(AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"


def test_two_frontends_share_the_port_and_the_numbers(team_server):
    assert len(frontends(team_server)) == 2
    before = samples(team_server)

    def ask(name):
        with httpx.Client(base_url=team_server.url, headers=key(name), timeout=300) as client:
            client.post(COMPLETIONS, json=body(4)).raise_for_status()

    # Each on a connection of its own, so that both frontends are likely to get some.
    threads = [threading.Thread(target=ask, args=(name,)) for name in ("alice", "bob") * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    # Whichever frontend answers, it tells of both.
    for _ in range(4):
        after = samples(team_server)
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        assert grown["vllm:generation_tokens_total"] == 64
        assert grown["vllm:request_success_total{finished_reason=length}"] == 16
        for part in ("queue", "prefill", "decode", "inference"):
            assert grown[f"vllm:request_{part}_time_seconds_count"] == 16
        assert grown["vllm:request_prefill_time_seconds_sum"] > 0
        assert grown["streamserve:key_generation_tokens_total{key=alice}"] == 32
        assert grown["streamserve:key_generation_tokens_total{key=bob}"] == 32
        assert grown["http_requests_total{handler=/v1/completions,method=POST,status=2xx}"] == 16
        assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
        assert {name for name in after if name.startswith("streamserve:streams_open")} == {
            "streamserve:streams_open{frontend=0}",
            "streamserve:streams_open{frontend=1}",
        }


def test_every_process_shows_what_it_uses(team_server):
    found = samples(team_server)
    supervisor = psutil.Process(team_server.process.pid)
    (engine,) = (child for child in supervisor.children() if "streamserve.engine.process" in child.cmdline())
    started_s = {"supervisor": supervisor.create_time(), "engine": engine.create_time()}
    for process in ("supervisor", "engine", "frontend-0", "frontend-1"):
        labels = f"{{process={process}}}"
        assert found[f"process_cpu_seconds_total{labels}"] > 0
        assert found[f"process_resident_memory_bytes{labels}"] > 2**20
        assert found[f"process_max_fds{labels}"] >= found[f"process_open_fds{labels}"] > 3
        shown_s = found[f"process_start_time_seconds{labels}"]
        assert shown_s == pytest.approx(started_s.get(process, shown_s), abs=1)
    assert found["process_resident_memory_bytes{process=engine}"] == pytest.approx(
        engine.memory_info().rss, rel=0.2
    )


def test_a_stream_is_seen_and_ended_through_either_frontend(team_server):
    started, events = threading.Event(), []

    def stream():
        with (
            httpx.Client(base_url=team_server.url, timeout=300) as client,
            client.stream(
                "POST",
                COMPLETIONS,
                json=body(5000, stream=True),
                headers={**key("alice"), "X-Request-Id": "long-one"},
            ) as response,
        ):
            for event in sse_events(response):
                events.append(event)
                started.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert started.wait(300)
    path = f"{team_server.url}/v1/streams/cmpl-long-one"
    # New connections each time: sooner or later both frontends are asked.
    for _ in range(6):
        seen = httpx.get(path, headers=key("alice"), timeout=300)
        assert seen.json()["status"] == "running"
        assert httpx.get(path, headers=key("bob"), timeout=300).status_code == 404
    listed = httpx.get(f"{team_server.url}/v1/streams", headers=key("root"), timeout=300).json()
    assert [entry["id"] for entry in listed["data"]] == ["cmpl-long-one"]
    assert httpx.delete(path, headers=key("alice"), timeout=300).json()["status"] == "cancelled"
    thread.join(300)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"
    wait_until(lambda: samples(team_server)["vllm:num_requests_running"] == 0, "the engine is idle")
    assert samples(team_server)["vllm:request_success_total{finished_reason=abort}"] == 1


def test_control_and_a_deep_look(team_server):
    def reset(name):
        return httpx.post(f"{team_server.url}/reset_prefix_cache", headers=key(name), timeout=300)

    assert reset("alice").status_code == 403
    assert reset("root").json() == {"ok": True}
    deep = httpx.get(f"{team_server.url}/health?deep=1", timeout=300)
    assert deep.status_code == 200
    assert deep.json()["seconds"] > 0


def test_lines_of_the_log_are_json_and_hold_neither_keys_nor_prompts(team_server):
    request = body(1, prompt="xyzzy and plugh")
    httpx.post(team_server.url + COMPLETIONS, json=request, headers=key("bob"), timeout=300)
    wait_until(lambda: '"key": "bob"' in team_server.output, "the request is in the log")
    lines = [json.loads(line) for line in team_server.output.splitlines() if line.startswith("{")]
    processes = {line["process"] for line in lines}
    assert {"supervisor", "frontend 0", "frontend 1"} <= processes
    assert "sk-" not in team_server.output
    assert "xyzzy" not in team_server.output


@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_lets_streams_finish_answers_503_to_others_and_is_exit_code_0(tiny_model, to_group):
    """The signal goes to the supervisor, or to all processes at once as a terminal sends it."""
    server = RunningServer(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--api-workers=2",
        "--num-gpu-blocks-override=1000",
        "--max-num-seqs=4",
        "--drain-timeout=200",
        env={"OMP_NUM_THREADS": "1"},
        has_own_group=True,
    ).wait_ready()
    try:
        started, events, statuses = threading.Event(), [], []

        def stream():
            with (
                httpx.Client(base_url=server.url, timeout=300) as client,
                client.stream("POST", COMPLETIONS, json=body(5000, stream=True)) as response,
            ):
                for event in sse_events(response):
                    events.append(event)
                    started.set()

        thread = threading.Thread(target=stream)
        thread.start()
        assert started.wait(300)
        if to_group:
            os.killpg(server.process.pid, signal.SIGINT)
        else:
            server.process.send_signal(signal.SIGTERM)

        def is_refusing():
            # One of the frontends has no stream and may be gone already, with a connection in its hands.
            try:
                statuses.append(httpx.get(f"{server.url}/ready", timeout=300).status_code)
            except httpx.TransportError:
                return False
            return statuses[-1] == 503

        wait_until(is_refusing, "new requests are answered 503")
        refused = httpx.post(server.url + COMPLETIONS, json=body(1), timeout=300)
        assert refused.status_code == 503
        thread.join(300)
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(300) == 0
    finally:
        server.stop()
