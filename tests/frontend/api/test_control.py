"""Health, version, models, and every error's form."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamserve.ipc.board import EngineState


async def test_health_follows_the_engine(run_harness: Any) -> None:
    async with run_harness(says_hello=False) as frontend:

        async def health() -> tuple[int, str]:
            response = await frontend.http.get("/health")
            return response.status_code, response.json()["status"]

        assert await health() == (503, "loading")
        refused = await frontend.chat()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        frontend.engine.hello()
        await frontend.until_health(200, "ok")
        frontend.engine.board.publish(1, EngineState.DRAINING)
        assert await health() == (503, "draining")
        assert (await frontend.chat()).status_code == 503
        frontend.engine.board.publish(1, EngineState.DEAD)
        frontend.frontend_bell.ring()
        await frontend.until_health(503, "dead")
        assert (await frontend.chat()).status_code == 503


async def test_an_engine_that_does_not_answer_is_not_healthy(run_harness: Any) -> None:
    async with run_harness(heartbeat_timeout_s=1.5) as frontend:
        await frontend.until_health(200, "ok")
        frontend.engine.answers_pings = False
        await frontend.engine.until(lambda: bool(frontend.engine.calls))
        await frontend.until_health(503, "stuck")
        # One question is open; a stuck engine is not asked again and again.
        assert frontend.engine.calls == [{"method": "ping"}]


async def test_an_idle_engine_is_asked_and_stays_healthy(run_harness: Any) -> None:
    async with run_harness(heartbeat_timeout_s=1.6) as frontend:
        await frontend.engine.until(lambda: len(frontend.engine.calls) >= 2)
        assert (await frontend.http.get("/health")).status_code == 200
        assert frontend.pump.gauges["running"] == 0


async def test_load_is_that_of_now(run_harness: Any) -> None:
    async with run_harness() as frontend:
        frontend.engine.is_automatic, frontend.engine.max_running = False, 1
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(frontend.complete(max_tokens=1))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 3)
            load = (await frontend.http.get("/load")).json()
            assert load == {"server_load": 3, **frontend.engine.statistics()}
            assert (load["running"], load["waiting"]) == (1, 2)
            while frontend.engine.step():
                pass
        assert (await frontend.http.get("/load")).json()["server_load"] == 0
        frontend.engine.die(frontend.frontend_bell)
        await frontend.until_health(503, "dead")
        assert (await frontend.http.get("/load")).status_code == 503


async def test_version(frontend: Any) -> None:
    body = (await frontend.http.get("/version")).json()
    assert body.keys() == {"version"}


async def test_models(run_harness: Any) -> None:
    async with run_harness(says_hello=False) as frontend:
        loading = (await frontend.http.get("/v1/models")).json()
        assert loading["data"][0].keys() == {"id", "object", "created", "owned_by"}
        frontend.engine.hello()
        await frontend.until_health(200, "ok")
        body = (await frontend.http.get("/v1/models")).json()
        card = {
            "id": "tiny",
            "object": "model",
            "created": 1700000000,
            "owned_by": "streamserve",
            "max_model_len": 512,
        }
        assert body == {"object": "list", "data": [card]}
        assert (await frontend.http.get("/v1/models/tiny")).json() == card
        for name in ("some/other", ""):
            missing = await frontend.http.get(f"/v1/models/{name}")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/nowhere", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_have_the_same_form(
    frontend: Any, method: str, path: str, status: int, code: str
) -> None:
    response = await frontend.http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == code
    assert error.keys() == {"message", "type", "param", "code"}
    if status == 405:
        assert response.headers["allow"]


async def test_a_fault_of_our_own_tells_nothing(frontend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("secret path /etc/x")

    monkeypatch.setattr(type(frontend.service), "assembler", broken)
    frontend.http._transport.raise_app_exceptions = False
    response = await frontend.chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    # What comes of an exchange that nobody foresaw, the next one must not meet.
    assert response.headers["connection"] == "close"


async def test_too_many_waiting_requests_are_turned_away(run_harness: Any) -> None:
    async with run_harness(max_waiting=3) as frontend:
        frontend.engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(frontend.complete(max_tokens=1)) for _ in range(3)]
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 3)
            for stream in (False, True):
                refused = await frontend.complete(stream=stream)
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "overloaded"
                assert int(refused.headers["retry-after"]) >= 1
            assert (await frontend.http.get("/health")).status_code == 200
            frontend.engine.step()
        assert all(task.result().status_code == 200 for task in waiting)
        frontend.engine.is_automatic = True
        assert (await frontend.complete(max_tokens=1)).status_code == 200
        assert len(frontend.engine.adds) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_given_up_ends_every_stream(
    run_harness: Any, events: Any, stream: bool
) -> None:
    async with run_harness() as frontend:
        frontend.engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            started = group.create_task(frontend.chat(stream=stream))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            frontend.engine.step()
            await frontend.until(lambda: not frontend.client.admission.waiting)
            queued = group.create_task(frontend.chat(stream=stream))
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 2)
            frontend.engine.die(frontend.frontend_bell)
        assert queued.result().status_code == 503
        if stream:
            last = events(started.result().text)[-1]
            assert last["error"]["code"] == "engine_unavailable"
        else:
            assert started.result().status_code == 503
        assert (await frontend.http.get("/health")).status_code == 503
        assert (await frontend.chat()).status_code == 503


async def test_a_new_engine_takes_over(run_harness: Any) -> None:
    async with run_harness() as frontend:
        assert (await frontend.complete(max_tokens=1)).status_code == 200
        frontend.engine.crash(frontend.frontend_bell)
        await frontend.until(lambda: frontend.pump.engine is None)
        for path in ("/health", "/ready"):
            response = await frontend.http.get(path)
            assert (response.status_code, response.json()["status"]) == (503, "loading")
        frontend.engine.facts["max_model_len"] = 100
        frontend.engine.succeed()
        await frontend.until_health(200, "ok")
        response = await frontend.complete(max_tokens=2)
        assert response.json()["usage"]["completion_tokens"] == 2
        assert (await frontend.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 100


async def test_a_restart_without_a_word_of_the_board_is_noticed(run_harness: Any) -> None:
    async with run_harness() as frontend:
        frontend.engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(frontend.complete())
            await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
            frontend.engine.live.clear()
            frontend.engine.is_automatic = True
            frontend.engine.hello(epoch=2)
        assert asked.result().status_code == 200
        assert len(frontend.engine.adds) == 2


async def test_frames_of_an_earlier_engine_are_dropped(frontend: Any) -> None:
    frontend.engine.is_automatic = False
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(frontend.complete(max_tokens=2))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        stream = frontend.engine.adds[0].stream
        frontend.engine.push_step([stream], [2], [2], [9, 9], epoch=0)
        while frontend.engine.step():
            pass
    assert asked.result().json()["choices"][0]["text"] == frontend.decode(frontend.encode("hello")[:2])


async def test_control_calls(frontend: Any) -> None:
    assert (await frontend.client.call({"method": "reset_prefix_cache"}))["ok"]
    assert frontend.engine.calls == [{"method": "reset_prefix_cache"}]
