"""What operators ask for: metrics, probes, and a server that stops in good order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect

from streamserve.config import ServerConfig
from streamserve.frontend import deep_health
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.heap import Heap
from streamserve.frontend.keys import KeyRing
from streamserve.frontend.monitor import Monitor
from streamserve.ipc.board import EngineState

WAIT_S = 60.0
KEYS = KeyRing(["alice:sk-alice", "bob:sk-bob"], ["root:sk-root"])


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


@pytest.fixture
async def guarded(run_harness: Any) -> AsyncIterator[Any]:
    async with run_harness(deployment=Deployment(keys=KEYS)) as frontend:
        yield frontend


# Metrics


async def samples(frontend: Any, **headers: Any) -> dict[str, float]:
    response = await frontend.http.get("/metrics", **headers)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine", "frontend")}
            inside = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_finished_request_is_counted(guarded: Any, stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "stream": stream}
    await guarded.http.post("/v1/completions", json=body, headers=key("bob"))
    found = await samples(guarded, headers=key("root"))
    num_prompt = len(guarded.engine.adds[0].tokens)
    assert found["vllm:request_success_total{finished_reason=length}"] == 1
    assert found["vllm:generation_tokens_total"] == 5
    assert found["vllm:prompt_tokens_total"] == num_prompt
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    # Tokens that came together have no time between them.
    assert 1 <= found["vllm:inter_token_latency_seconds_count"] <= 4
    assert found["vllm:request_generation_tokens_sum"] == 5
    assert found["vllm:request_params_max_tokens_sum"] == 5
    assert found["vllm:request_params_n_sum"] == 1
    assert found["streamserve:key_generation_tokens_total{key=bob}"] == 5
    assert found["streamserve:key_requests_total{key=alice}"] == 0
    assert found["http_requests_total{handler=/v1/completions,method=POST,status=2xx}"] == 1
    assert found["http_request_duration_seconds_count{handler=/v1/completions,method=POST}"] == 1
    assert found["http_request_duration_highr_seconds_count"] == 1
    assert found["streamserve:streams_open"] == 0
    assert found["streamserve:ring_capacity_bytes{ring=request}"] > 0
    assert found["vllm:num_requests_running"] == 0


async def test_the_parts_of_a_requests_time_add_up(frontend: Any) -> None:
    await frontend.complete(max_tokens=5, ignore_eos=True)
    found = await samples(frontend)
    parts = {
        part: f"vllm:request_{part}_time_seconds" for part in ("queue", "prefill", "decode", "inference")
    }
    assert [found[f"{name}_count"] for name in parts.values()] == [1, 1, 1, 1]
    seconds = {part: found[f"{name}_sum"] for part, name in parts.items()}
    assert min(seconds.values()) >= 0
    first = found["vllm:time_to_first_token_seconds_sum"]
    assert seconds["queue"] + seconds["prefill"] == pytest.approx(first)
    assert seconds["prefill"] + seconds["decode"] == pytest.approx(seconds["inference"])
    assert seconds["queue"] + seconds["inference"] <= found["vllm:e2e_request_latency_seconds_sum"]


async def test_an_aborted_request_has_the_times_that_it_got_to(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(frontend.complete(max_tokens=2)) for _ in range(3)]
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 3)
        frontend.engine.begin([add.stream for add in frontend.engine.adds[:2]])
        mailboxes = frontend.streams.slots
        await frontend.until(lambda: sum(box.began_s is not None for box in mailboxes) == 2)
        for task in tasks:
            task.cancel()
    await frontend.engine.until(lambda: len(frontend.engine.aborts) == 3)
    found = await samples(frontend)
    assert found["vllm:request_success_total{finished_reason=abort}"] == 3
    assert found["vllm:e2e_request_latency_seconds_count"] == 3
    assert found["vllm:request_queue_time_seconds_count"] == 2
    assert found["vllm:request_prefill_time_seconds_count"] == 0
    assert found["vllm:request_inference_time_seconds_count"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_sizes_of_bodies_are_counted(frontend: Any, stream: bool) -> None:
    async with frontend.served() as url, httpx.AsyncClient(base_url=url) as http:
        body = json.dumps({"prompt": "hello", "max_tokens": 2, "stream": stream}).encode()
        answer = await http.post("/v1/completions", content=body)
        assert answer.status_code == 200
        await http.get("/version")
    found = await samples(frontend)
    assert found["http_request_size_bytes_count{handler=/v1/completions}"] == 1
    assert found["http_request_size_bytes_sum{handler=/v1/completions}"] == len(body)
    assert found["http_response_size_bytes_count{handler=/v1/completions}"] == 1
    told = 0 if stream else len(answer.content)
    assert found["http_response_size_bytes_sum{handler=/v1/completions}"] == told
    assert found["http_request_size_bytes_sum{handler=/version}"] == 0
    assert found["http_response_size_bytes_sum{handler=/version}"] > 0


async def test_what_a_client_only_says_of_its_body_is_not_counted(frontend: Any) -> None:
    async with frontend.served(max_body_bytes=1000) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999\r\n\r\nabc"
        )
        async with asyncio.timeout(60):
            assert (await reader.readline()).split()[1] == b"413"
        writer.close()
    found = await samples(frontend)
    assert found["http_request_size_bytes_count{handler=/v1/completions}"] == 1
    assert found["http_request_size_bytes_sum{handler=/v1/completions}"] <= 3


async def test_dropped_streams_are_counted_and_gauges_are_right_on_an_idle_server(frontend: Any) -> None:
    """Cases I1 and I2: 5 streams whose clients leave."""
    frontend.engine.is_automatic = False
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with frontend.served() as url:
        writers = []
        payload = json.dumps(body).encode()
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(payload), payload)
            )
            writers.append((reader, writer))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 5)
        frontend.engine.step()
        for reader, _ in writers:
            await reader.readuntil(b"data: ")
        running = await samples(frontend)
        assert running["vllm:num_requests_running"] == 5
        assert running["streamserve:streams_open"] == 5
        for _, writer in writers:
            writer.transport.abort()
        await frontend.engine.until(lambda: len(frontend.engine.aborts) == 5)
        await frontend.until(lambda: not len(frontend.service.registry))
    idle = await samples(frontend)
    assert idle["vllm:num_requests_running"] == idle["vllm:num_requests_waiting"] == 0
    assert idle["vllm:kv_cache_usage_perc"] == 0
    assert idle["vllm:request_success_total{finished_reason=abort}"] == 5
    assert idle["vllm:generation_tokens_total"] == idle["vllm:request_generation_tokens_sum"] == 5
    assert idle["vllm:e2e_request_latency_seconds_count"] == 5
    assert idle["streamserve:streams_open"] == 0


async def test_what_is_turned_away_is_counted_as_that(run_harness: Any) -> None:
    async with run_harness(max_waiting=1) as frontend:
        frontend.engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            group.create_task(frontend.complete(max_tokens=1))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            assert (await frontend.complete()).status_code == 429
            found = await samples(frontend)
            assert found["vllm:admission_rejections_total{reason=max_waiting}"] == 1
            assert found["streamserve:requests_unstarted"] == 1
            frontend.engine.step()
        found = await samples(frontend)
        assert found["vllm:request_success_total{finished_reason=length}"] == 1
        assert found["vllm:request_success_total{finished_reason=error}"] == 0


async def test_metrics_outlive_the_engine(frontend: Any) -> None:
    await frontend.complete(max_tokens=1)
    assert (await samples(frontend))["streamserve:engine_up"] == 1
    frontend.engine.die(frontend.frontend_bell)
    await frontend.until_health(503, "dead")
    found = await samples(frontend)
    assert found["streamserve:engine_up"] == 0
    assert found["vllm:generation_tokens_total"] == 1
    assert "vllm:num_requests_running" not in found


async def test_unknown_paths_and_methods_do_not_make_new_series(frontend: Any) -> None:
    before = await samples(frontend)
    for path in ("/a", "/b", "/v1/chat/completions/x"):
        await frontend.http.request("BREW", path)
    after = await samples(frontend)
    grown = {name for name in after if name.startswith("http_requests_total") and name not in before}
    assert grown == {"http_requests_total{handler=none,method=other,status=4xx}"}


async def test_sockets_are_counted(guarded: Any) -> None:
    async with guarded.served() as url:
        async with connect(url.replace("http", "ws") + "/v1/ws", additional_headers=key("bob")):
            found = await samples(guarded, headers=key("bob"))
            assert found["vllm:websocket_connections_active"] == 1
        closed = guarded.service.registry.metrics.sockets.active
        await guarded.until(lambda: closed.value == 0)
    assert (await samples(guarded, headers=key("bob")))["vllm:websocket_connections_total"] == 1


async def test_the_lag_of_the_event_loop_is_measured(frontend: Any) -> None:
    async with frontend.served():
        name = "streamserve:event_loop_lag_seconds"
        row = frontend.service.registry.metrics.row
        family = next(family for family in row.layout.families if family.name == name)
        at = row.layout.place(name)
        await frontend.until(lambda: sum(row.cells[at : at + len(family.buckets) + 1].tolist()) >= 2)


class FakeHeap(Heap):
    def __init__(self, free_bytes: int) -> None:
        self.free, self.num_trims = free_bytes, 0

    def free_bytes(self) -> int:
        return self.free

    def trim(self) -> None:
        self.num_trims += 1
        self.free = 0


async def test_memory_that_was_freed_is_given_back_if_it_is_much(frontend: Any) -> None:
    for free_bytes, is_trimmed in ((10**6, False), (10**8, True)):
        heap = FakeHeap(free_bytes)
        monitor = Monitor(frontend.client, frontend.service.registry.metrics, frontend.service.kept, heap)
        monitor.start()
        try:
            if is_trimmed:
                await frontend.until(lambda heap=heap: heap.num_trims == 1)
            else:
                monitor.tidy()
        finally:
            monitor.stop()
        assert heap.num_trims == is_trimmed


# Probes


async def test_probes_tell_living_from_ready(run_harness: Any) -> None:
    async with run_harness(says_hello=False) as frontend:
        assert (await frontend.http.get("/live")).json() == {"status": "ok"}
        loading = await frontend.http.get("/ready")
        assert (loading.status_code, loading.json()) == (503, {"status": "loading", "progress": None})
        for method in ("GET", "POST"):
            assert (await frontend.http.request(method, "/ping")).status_code == 503
        frontend.engine.hello()
        await frontend.until_health(200, "ok")
        assert (await frontend.http.get("/ready")).json() == {"status": "ok"}
        assert (await frontend.http.post("/ping")).status_code == 200
        frontend.client.drain()
        assert (await frontend.http.get("/ready")).json() == {"status": "draining"}
        assert (await frontend.http.get("/live")).status_code == 200


class Said:
    """A notice, and a status board, of a supervisor."""

    def __init__(self, text: bytes, epoch: int, state: Any) -> None:
        self.text = text
        self.shown = epoch, state

    def read(self) -> Any:
        return self.shown


async def test_a_start_shows_how_far_it_is_and_whether_it_is_the_first(run_harness: Any) -> None:
    class Notice:
        def read(self) -> bytes:
            return b'{"stage": "loading weights", "fraction": 0.25}'

    around = Deployment(board=Said(b"", 2, EngineState.STARTING), progress=Notice())
    async with run_harness(deployment=around, says_hello=False) as frontend:
        body = (await frontend.http.get("/ready")).json()
        assert body == {
            "status": "restarting",
            "progress": {"stage": "loading weights", "fraction": 0.25},
        }
        assert (await samples(frontend))["streamserve:engine_restarts_total"] == 1


async def test_a_deep_look_runs_a_token(frontend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_health, "FRESH_S", float("inf"))
    response = await frontend.http.get("/health?deep=1")
    assert response.status_code == 200
    assert response.json()["status"] == "ok"
    assert response.json()["seconds"] >= 0
    (add,) = frontend.engine.adds
    assert add.params.max_tokens == 1
    # Those that ask at once share the answer.
    await asyncio.gather(*[frontend.http.get("/health?deep=true") for _ in range(10)])
    assert len(frontend.engine.adds) == 1
    assert (await frontend.http.get("/health?deep=0")).json() == {"status": "ok"}
    assert (await frontend.http.get("/health?deep=maybe")).json()["error"]["param"] == "deep"
    # It is no request of anybody's.
    assert (await samples(frontend))["vllm:request_success_total{finished_reason=length}"] == 0


async def test_a_deep_look_that_gets_no_token_is_503(run_harness: Any) -> None:
    around = Deployment(server=ServerConfig(deep_health_timeout=0.1))
    async with run_harness(deployment=around) as frontend:
        frontend.engine.is_automatic = False
        response = await frontend.http.get("/health?deep=1")
        assert response.status_code == 503
        assert response.json() == {"status": "failed", "error": "No token came within 0.1 s."}
        await frontend.engine.until(lambda: bool(frontend.engine.aborts))
        assert (await frontend.http.get("/health")).status_code == 200


async def test_a_deep_look_of_a_full_queue_is_503(run_harness: Any) -> None:
    async with run_harness(max_waiting=1) as frontend:
        frontend.engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            group.create_task(frontend.complete(max_tokens=1))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            response = await frontend.http.get("/health?deep=1")
            assert (response.status_code, response.json()["status"]) == (503, "failed")
            frontend.engine.step()


# Stopping


async def test_a_draining_server_goes_on_with_what_it_has_and_answers_503_to_the_rest(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    async with frontend.served(drain_timeout_s=30.0) as url:
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
            body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, "stream": True}
            asked = asyncio.ensure_future(http.post("/v1/completions", json=body))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            frontend.engine.step()
            frontend.server.drain()
            refused = await http.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert refused.headers["connection"] == "close"
            assert (await http.get("/ready")).json()["status"] == "draining"
            while frontend.engine.step():
                pass
            assert (await asked).text.endswith("data: [DONE]\n\n")
        await frontend.until(lambda: frontend.server.should_exit)
        assert len(frontend.engine.adds) == 1


async def test_what_is_not_done_at_the_end_of_the_drain_ends_with_an_error(
    frontend: Any, events: Any
) -> None:
    frontend.engine.is_automatic = False
    async with frontend.served(drain_timeout_s=0.2) as url:
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
            body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, "stream": True}
            asked = asyncio.ensure_future(http.post("/v1/completions", json=body))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            frontend.engine.step()
            frontend.server.drain()
            last = events((await asked).text)[-1]
            assert last["error"]["code"] == "engine_unavailable"
        await frontend.until(lambda: frontend.server.should_exit)


async def closing_of(socket: Any) -> tuple[int, list[Any]]:
    """The code that a socket is closed with, and what comes before."""
    async with asyncio.timeout(WAIT_S):
        messages = [json.loads(message) async for message in socket]
    return socket.close_code, messages


async def test_an_idle_socket_is_closed_when_the_server_stops(frontend: Any) -> None:
    async with frontend.served() as url, connect(url.replace("http", "ws") + "/v1/ws") as socket:
        await socket.send('{"type":"ping"}')
        await socket.recv()
        frontend.server.drain()
        assert await closing_of(socket) == (1001, [])
        await frontend.until(lambda: frontend.server.should_exit)


async def test_a_sockets_streams_go_on_to_their_end_when_the_server_stops(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    async with frontend.served() as url, connect(url.replace("http", "ws") + "/v1/ws") as socket:
        body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, "stream": True}
        create = {"type": "create", "id": 1, "endpoint": "completions", "body": body}
        await socket.send(json.dumps(create))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        frontend.engine.step()
        frontend.server.drain()
        while frontend.engine.step():
            pass
        code, messages = await closing_of(socket)
        assert code == 1001
        assert messages[-1] == {"id": 1, "type": "done"}


async def test_a_socket_that_is_not_done_in_time_hears_why(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    async with (
        frontend.served(drain_timeout_s=0.2) as url,
        connect(url.replace("http", "ws") + "/v1/ws") as socket,
    ):
        body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
        create = {"type": "create", "id": 1, "endpoint": "completions", "body": body}
        await socket.send(json.dumps(create))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        frontend.engine.step()
        frontend.server.drain()
        code, messages = await closing_of(socket)
        assert code == 1001
        assert messages[-1]["error"]["code"] == "engine_unavailable"
