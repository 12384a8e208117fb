"""What every exchange passes: ids, keys, CORS, a proxy, the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from streamserve.config import AuthConfig, ServerConfig
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.keys import KeyRing

WAIT_S = 60.0
KEYS = KeyRing(["alice:sk-alice", "bob:sk-bob"], ["root:sk-root"])
ORIGIN = {"Origin": "https://page.example"}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


@pytest.fixture
async def guarded(run_harness: Any) -> AsyncIterator[Any]:
    async with run_harness(deployment=Deployment(keys=KEYS)) as frontend:
        yield frontend


# Request ids


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/nowhere", 404),
        ("PUT", "/v1/models", 405),
        ("POST", "/v1/chat/completions", 400),
        ("GET", "/v1/streams/none", 404),
    ],
)
async def test_every_answer_has_the_id_of_its_request(
    frontend: Any, method: str, path: str, status: int
) -> None:
    given = await frontend.http.request(method, path, headers={"X-Request-Id": "mine-1"})
    assert (given.status_code, given.headers["x-request-id"]) == (status, "mine-1")
    made = await frontend.http.request(method, path)
    assert len(made.headers["x-request-id"]) == 32


@pytest.mark.parametrize("bad", [b"a b", b"x" * 129, b"\xff", b"", b"a\tb", b"<script>"])
async def test_an_id_that_is_unfit_for_headers_and_logs_is_replaced(frontend: Any, bad: bytes) -> None:
    response = await frontend.http.get("/health", headers={b"X-Request-Id": bad})
    assert response.headers["x-request-id"].encode("latin-1") != bad
    assert len(response.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_id_of_an_answer_is_that_of_its_request(frontend: Any, stream: bool) -> None:
    response = await frontend.complete(max_tokens=1, stream=stream)
    assert f'"id":"cmpl-{response.headers["x-request-id"]}"' in response.text


async def test_a_fault_of_our_own_has_an_id_too(frontend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any) -> None:
        raise RuntimeError("x")

    monkeypatch.setattr(type(frontend.service.registry), "all", broken)
    frontend.http._transport.raise_app_exceptions = False
    response = await frontend.http.get("/v1/streams", headers={"X-Request-Id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")


# Keys


@pytest.mark.parametrize("stream", [False, True])
async def test_only_a_key_gets_an_answer(guarded: Any, stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 1, "stream": stream}
    refused = await guarded.http.post("/v1/completions", json=body)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.headers["x-request-id"]
    assert guarded.engine.adds == []
    served = await guarded.http.post("/v1/completions", json=body, headers=key("bob"))
    assert served.status_code == 200
    assert guarded.engine.adds[0].tenant == "bob"


async def test_the_key_of_nobody_is_401_whatever_its_bytes(guarded: Any) -> None:
    for value in (b"Bearer \xff\xfe", b"Bearer ", "Bearer schlüssel".encode(), b"Bearer " + b"x" * 8000):
        response = await guarded.http.get("/v1/models", headers={b"Authorization": value})
        assert response.status_code == 401


async def test_control_is_for_administrators(guarded: Any) -> None:
    async def reset(**headers: Any) -> httpx.Response:
        return await guarded.http.post("/reset_prefix_cache", **headers)

    assert (await reset()).status_code == 401
    assert (await reset(headers=key("alice"))).json()["error"]["code"] == "admin_key_required"
    assert guarded.engine.calls == []
    done = await reset(headers=key("root"))
    assert (done.status_code, done.json()) == (200, {"ok": True})
    assert {"method": "reset_prefix_cache"} in guarded.engine.calls


async def test_a_server_without_an_admin_key_has_no_control(frontend: Any) -> None:
    refused = await frontend.http.post("/reset_prefix_cache")
    assert refused.status_code == 403
    assert "--admin-key" in refused.json()["error"]["message"]


async def test_a_cache_that_is_off_is_not_reset(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_body: Any) -> Any:
        return {"ok": False}

    monkeypatch.setattr(guarded.client, "call", refuse)
    response = await guarded.http.post("/reset_prefix_cache", headers=key("root"))
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "no_prefix_cache"


async def test_metrics_need_a_key_unless_they_are_open(run_harness: Any, guarded: Any) -> None:
    assert (await guarded.http.get("/metrics")).status_code == 401
    assert (await guarded.http.get("/metrics", headers=key("alice"))).status_code == 200
    around = Deployment(keys=KEYS, auth=AuthConfig(metrics_open=True))
    async with run_harness(deployment=around) as frontend:
        assert (await frontend.http.get("/metrics")).status_code == 200
        assert (await frontend.http.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("path", ["/v1/ws", "/v1/responses", "/health", "/nowhere"])
async def test_a_websocket_is_turned_down_with_a_status_before_it_opens(guarded: Any, path: str) -> None:
    async with guarded.served() as url:
        address = url.replace("http", "ws") + path
        for options in (
            {},
            {"additional_headers": {"Authorization": "Bearer wrong"}},
            {"subprotocols": ["streamserve", "openai-insecure-api-key.wrong"]},
        ):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(address, **options):
                    pass
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"
            assert refused.value.response.headers["x-request-id"]


async def test_a_websocket_opens_with_a_key_in_either_place(guarded: Any) -> None:
    async with guarded.served() as url:
        address = url.replace("http", "ws") + "/v1/ws"
        async with connect(address, additional_headers=key("alice")) as socket:
            await socket.send('{"type":"ping"}')
            assert json.loads(await socket.recv()) == {"type": "pong"}
        offered: Any = ["streamserve", "openai-insecure-api-key.sk-bob"]
        async with connect(address, subprotocols=offered) as socket:
            assert socket.subprotocol == "streamserve"
            assert socket.response is not None
            assert "sk-bob" not in str(socket.response.headers)


async def test_a_websocket_with_a_key_that_is_no_ascii_is_401(guarded: Any) -> None:
    async with guarded.served() as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /v1/ws?api_key=\xff HTTP/1.1\r\nhost: localhost\r\n"
            b"upgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            b"authorization: Bearer \xff\xfe\xe4\r\n\r\n"
        )
        async with asyncio.timeout(WAIT_S):
            status = await reader.readline()
        assert status.split()[1] in (b"400", b"401")
        writer.close()
        assert (await guarded.http.get("/health")).status_code == 200


# Browsers


@pytest.fixture
async def browsable(run_harness: Any) -> AsyncIterator[Any]:
    server = ServerConfig(allowed_origins=("https://page.example",))
    async with run_harness(deployment=Deployment(server=server, keys=KEYS)) as frontend:
        yield frontend


async def test_a_preflight_request_needs_no_key(browsable: Any) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = await browsable.http.options("/v1/chat/completions", headers={**ORIGIN, **asks})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN["Origin"]
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    refused = await browsable.http.options(
        "/v1/chat/completions", headers={"Origin": "https://other.example", **asks}
    )
    assert "access-control-allow-origin" not in refused.headers
    plain = await browsable.http.options("/v1/chat/completions")
    assert plain.status_code == 401


async def test_a_page_may_read_answers_and_refusals_and_their_ids(browsable: Any) -> None:
    for headers, status in (({}, 401), (key("alice"), 200)):
        response = await browsable.http.get("/v1/models", headers={**ORIGIN, **headers})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        assert "x-request-id" in response.headers["access-control-expose-headers"]


async def test_without_origins_no_page_may(guarded: Any) -> None:
    response = await guarded.http.get("/v1/models", headers={**ORIGIN, **key("alice")})
    assert "access-control-allow-origin" not in response.headers


# Behind a proxy


async def test_a_prefix_that_a_proxy_takes_off_changes_no_route(guarded: Any) -> None:
    async with guarded.served(root_path="/llm") as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers=key("alice"))).status_code == 200
        assert (await http.post("/reset_prefix_cache", headers=key("alice"))).status_code == 403


async def test_only_a_trusted_proxy_says_who_the_client_is(
    frontend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"X-Forwarded-For": "203.0.113.9"}
    for trusted, client in ((("127.0.0.1",), "203.0.113.9"), (("192.0.2.1",), "127.0.0.1")):
        async with frontend.served(forwarded_allow_ips=trusted) as url, httpx.AsyncClient() as http:
            caplog.clear()
            with caplog.at_level(logging.INFO, "streamserve.access"):
                await http.get(f"{url}/version", headers=headers)
            (line,) = (record for record in caplog.records if record.name == "streamserve.access")
            assert line.fields["client"] == client  # type: ignore[attr-defined]


# The log


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "streamserve.access")
    return lambda: [record for record in caplog.records if record.name == "streamserve.access"]


async def test_a_line_says_who_asked_what_and_nothing_of_the_content(guarded: Any, lines: Any) -> None:
    headers = {**key("alice"), "X-Request-Id": "mine"}
    body = {"prompt": "hello", "max_tokens": 2, "stream": True}
    await guarded.http.post("/v1/completions?api_key=sk-alice", json=body, headers=headers)
    (line,) = lines()
    assert line.fields == {
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "duration_s": line.fields["duration_s"],
        "key": "alice",
        "request_id": "mine",
    }
    text = line.getMessage()
    assert '"POST /v1/completions" 200' in text
    assert "hello" not in text
    assert "sk-alice" not in text


async def test_probes_are_left_out_while_they_succeed(frontend: Any, lines: Any) -> None:
    for path in ("/health", "/live", "/ready", "/ping", "/metrics"):
        assert (await frontend.http.get(path)).status_code == 200
    assert lines() == []
    frontend.client.drain()
    assert (await frontend.http.get("/ready")).status_code == 503
    assert len(lines()) == 1


async def test_a_path_cannot_forge_a_line(frontend: Any, lines: Any) -> None:
    await frontend.http.get("/v1/models/x%0a2026-01-01%20INFO%20all%20is%20well" + "y" * 500)
    text = lines()[0].getMessage()
    assert "\n" not in text
    assert len(text) < 500


async def test_the_log_can_be_turned_off(run_harness: Any, lines: Any) -> None:
    async with run_harness(deployment=Deployment(server=ServerConfig(access_log=False))) as frontend:
        await frontend.http.get("/version")
    assert lines() == []


async def test_a_websocket_is_one_line(guarded: Any, lines: Any) -> None:
    async with guarded.served() as url:
        async with connect(url.replace("http", "ws") + "/v1/ws", additional_headers=key("bob")):
            pass
        await guarded.until(lambda: len(lines()) == 1)
    assert lines()[0].fields.items() >= {"method": "WS", "status": 101, "key": "bob"}.items()
