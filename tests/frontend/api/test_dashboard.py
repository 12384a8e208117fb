"""The dashboard's stream, as its page reads it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from streamserve.config import AuthConfig, ServerConfig
from streamserve.frontend.api import dashboard
from streamserve.frontend.api.dashboard_replies import Snapshot
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.keys import KeyRing
from streamserve.frontend.metrics import Layout, Metrics, Row

EVENTS = "/dashboard/events"
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty snapshots a second."""
    monkeypatch.setattr(dashboard, "INTERVAL_S", 0.05)


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[AsyncIterator[Any]]:
    """The data of the events, as they come; the connection is closed at the end."""

    async def read(response: httpx.Response) -> AsyncIterator[Any]:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)

    async with httpx.AsyncClient(timeout=LIMIT_S) as http, http.stream("GET", url + EVENTS) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].partition(";")[0] == "text/event-stream"
        yield read(response)


async def find(snapshots: AsyncIterator[Any], holds: Any) -> Any:
    async with asyncio.timeout(LIMIT_S):
        async for snapshot in snapshots:
            if holds(snapshot):
                return snapshot
    raise AssertionError("the stream has ended")


async def num_watchers(frontend: Any) -> float:
    text = (await frontend.http.get("/metrics")).text
    return sum(map(float, re.findall(r"^streamserve:dashboard_watchers\{.*\} (\S+)$", text, re.MULTILINE)))


async def until_watched_by(frontend: Any, number: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await num_watchers(frontend) != number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_numbers_move_while_a_stream_runs(run_harness: Any) -> None:
    async with run_harness() as frontend, frontend.served() as url, watching(url) as snapshots:
        frontend.engine.is_automatic = False
        idle = await anext(snapshots)
        Snapshot.model_validate_json(json.dumps(idle))
        assert idle["requests"] == {"running": 0, "waiting": 0, "open": 0.0}
        assert idle["first_token_s"]["p50"] is None
        asked = asyncio.create_task(frontend.complete("hello", max_tokens=40, ignore_eos=True))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        busy = await find(snapshots, lambda each: each["requests"]["running"])
        assert (busy["requests"]["running"], busy["requests"]["open"]) == (1, 1.0)
        while frontend.engine.step():
            # Until the frontend has taken the token: two that come at once are no time apart.
            await frontend.until(lambda: not frontend.client.ring_statistics()["delta"].used_bytes)
        assert (await asked).status_code == 200
        done = await find(snapshots, lambda each: not each["requests"]["open"])
        Snapshot.model_validate_json(json.dumps(done))
        assert done["at"] > busy["at"] > idle["at"]
        assert done["tokens_per_s"]["generated"] > 0
        assert done["steps"]["per_s"] > 0
        assert done["first_token_s"]["p99"] >= done["first_token_s"]["p50"] > 0
        assert done["between_tokens_s"]["p50"] > 0
        assert done["processes"]["engine"]["memory_bytes"] > 0


async def test_watchers_share_the_snapshots_and_leave_nothing(run_harness: Any) -> None:
    async with run_harness() as frontend, frontend.served() as url:
        async with watching(url) as one:
            await anext(one)
            async with watching(url) as other:
                await until_watched_by(frontend, 2)
                times = [{(await anext(each))["at"] for _ in range(10)} for each in (one, other)]
                assert len(times[0] & times[1]) >= 5
            await until_watched_by(frontend, 1)
            assert (await anext(one))["at"] > max(times[0])
        await until_watched_by(frontend, 0)
        num_calls = len(frontend.engine.calls)
        await asyncio.sleep(5 * dashboard.INTERVAL_S)
        assert len(frontend.engine.calls) == num_calls


async def test_ten_watchers_ask_the_engine_as_often_as_one(run_harness: Any) -> None:
    async with run_harness() as frontend, frontend.served() as url:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:

            async def watch() -> set[float]:
                async with watching(url) as snapshots:
                    return {(await anext(snapshots))["at"] for _ in range(5)}

            watchers = [group.create_task(watch()) for _ in range(10)]
        taken = set().union(*(watcher.result() for watcher in watchers))
        pings = [call for call in frontend.engine.calls if call == {"method": "ping"}]
        # The frontend's own heartbeat may ask once as well.
        assert len(pings) <= len(taken) + 1 < 20


async def test_any_frontend_tells_of_all(run_harness: Any) -> None:
    layout = Layout()
    memory = memoryview(bytearray(layout.segment_bytes(2)))
    around = Deployment(rows=memory, index=1)
    neighbour = Metrics(Row(layout, memory[: layout.row_bytes]))
    neighbour.streams_open.add(3)
    async with (
        run_harness(deployment=around) as frontend,
        frontend.served() as url,
        watching(url) as snapshots,
    ):
        assert (await anext(snapshots))["requests"]["open"] == 3.0
        neighbour.generation_tokens.add(500)
        await find(snapshots, lambda each: each["tokens_per_s"]["generated"])


async def test_a_silent_engine_stops_no_stream(run_harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "FRESH_TIMEOUT_S", 0.01)
    async with run_harness() as frontend, frontend.served() as url, watching(url) as snapshots:
        await anext(snapshots)
        frontend.engine.answers_pings = False
        for _ in range(3):
            assert (await anext(snapshots))["engine"]["up"] == 1


async def test_a_server_without_an_engine_says_so(run_harness: Any) -> None:
    async with (
        run_harness(says_hello=False) as frontend,
        frontend.served() as url,
        watching(url) as snapshots,
    ):
        shown = await anext(snapshots)
        Snapshot.model_validate_json(json.dumps(shown))
        assert shown["engine"]["up"] == 0
        assert shown["requests"]["running"] is None
        frontend.engine.hello()
        await find(snapshots, lambda each: each["engine"]["up"])


async def test_a_draining_server_waits_for_no_watcher(run_harness: Any) -> None:
    async with (
        run_harness() as frontend,
        frontend.served(drain_timeout_s=LIMIT_S) as url,
        watching(url) as snapshots,
    ):
        await anext(snapshots)
        frontend.server.drain()
        async with asyncio.timeout(LIMIT_S / 2):
            assert [each async for each in snapshots][-1] == "[DONE]"


@pytest.mark.parametrize("is_open", [False, True])
async def test_it_needs_a_key_where_metrics_do(run_harness: Any, is_open: bool) -> None:
    around = Deployment(keys=KeyRing(["sk"]), auth=AuthConfig(metrics_open=is_open))
    async with run_harness(deployment=around) as frontend, frontend.served() as url:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
            for headers, status in (
                ({}, 200 if is_open else 401),
                ({"Authorization": "Bearer wrong"}, 200 if is_open else 401),
                ({"Authorization": "Bearer sk"}, 200),
            ):
                for path in (EVENTS, "/metrics"):
                    async with http.stream("GET", path, headers=headers) as response:
                        assert response.status_code == status
        await until_gone(frontend)


async def until_gone(frontend: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while frontend.service.registry.metrics.row.counter("streamserve:dashboard_watchers").value:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_it_is_turned_off_with_the_page(run_harness: Any) -> None:
    around = Deployment(server=ServerConfig(dashboard=False))
    async with run_harness(deployment=around) as frontend:
        for path in ("/dashboard", EVENTS):
            assert (await frontend.http.get(path)).status_code == 404


async def test_no_cache_and_no_proxy_keeps_it(run_harness: Any) -> None:
    async with run_harness() as frontend, frontend.served() as url:
        async with httpx.AsyncClient(timeout=LIMIT_S) as http, http.stream("GET", url + EVENTS) as response:
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            assert "access-control-allow-origin" not in response.headers
        await until_gone(frontend)


async def test_it_is_not_counted_in_what_it_shows(run_harness: Any) -> None:
    async with run_harness() as frontend, frontend.served() as url:
        async with watching(url) as snapshots:
            await anext(snapshots)
        await until_watched_by(frontend, 0)
        text = (await frontend.http.get("/metrics")).text
        assert not re.search(r"http_requests_total\{.*dashboard", text)


async def test_head_is_answered_without_a_stream(run_harness: Any) -> None:
    async with run_harness() as frontend, frontend.served() as url:
        async with httpx.AsyncClient(timeout=LIMIT_S) as http:
            head = await http.head(url + EVENTS)
            # The connection is still open.
            await until_gone(frontend)
            async with http.stream("GET", url + EVENTS) as get:
                for name in ("content-type", "cache-control", "x-accel-buffering"):
                    assert head.headers[name] == get.headers[name]
        assert (head.status_code, head.content) == (200, b"")
        await until_gone(frontend)


async def test_a_hundred_watchers_cost_a_snapshot_a_turn(run_harness: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(dashboard, "INTERVAL_S", 0.5)
    async with run_harness() as frontend, frontend.served() as url:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:

            async def watch() -> list[float]:
                async with watching(url) as snapshots:
                    return [(await anext(snapshots))["at"] for _ in range(4)]

            watchers = [group.create_task(watch()) for _ in range(100)]
        seen = sorted({at for watcher in watchers for at in watcher.result()})
        assert all(later - earlier >= 0.49 for earlier, later in pairwise(seen))
        await until_watched_by(frontend, 0)


async def test_one_that_does_not_read_holds_up_nobody(run_harness: Any) -> None:
    async with run_harness() as frontend, frontend.served() as url, watching(url) as other:
        shown = await anext(other)
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect((host, int(port)))
            slow.sendall(f"GET {EVENTS} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            await until_watched_by(frontend, 2)
            for _ in range(5):
                before, shown = shown, await anext(other)
                assert shown["at"] > before["at"]
        await until_watched_by(frontend, 1)
