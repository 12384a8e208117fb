"""Who answers before the application is there."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from streamserve.config import AuthConfig, Config, ServerConfig, TlsConfig
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.keys import KeyRing
from streamserve.frontend.metrics import Metrics
from streamserve.frontend.reception import Reception, build_reception

WAIT_S = 60.0


@asynccontextmanager
async def received(config: Config | None = None, **around: Any) -> AsyncIterator[tuple[Reception, str]]:
    """A reception and its address."""
    config = config or Config()
    reception = Reception(build_reception(Deployment(server=config.server, **around), Metrics()), config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await reception.open(listener)
        try:
            yield reception, f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            reception.close()


async def test_it_says_nothing_of_progress_that_nobody_has_made() -> None:
    async with received() as (_, address), httpx.AsyncClient(timeout=WAIT_S) as http:
        unready = await http.get(f"http://{address}/ready")
        assert unready.status_code == 503
        assert unready.json() == {"status": "loading", "progress": None}


async def test_keys_make_no_difference() -> None:
    auth = AuthConfig(api_key=("sk-alice",))
    async with (
        received(auth=auth, keys=KeyRing.of(auth)) as (_, address),
        httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S) as http,
    ):
        for headers in ({}, {"Authorization": "Bearer sk-alice"}):
            assert (await http.get("/live", headers=headers)).status_code == 200
            assert (await http.get("/v1/models", headers=headers)).status_code == 503


async def test_a_path_prefix_is_taken_off() -> None:
    config = Config(server=ServerConfig(root_path="/llm"))
    async with received(config) as (_, address), httpx.AsyncClient(timeout=WAIT_S) as http:
        assert (await http.get(f"http://{address}/live")).status_code == 200


async def test_a_body_is_not_waited_for() -> None:
    async with received() as (_, address):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        assert head.startswith(b"HTTP/1.1 503 ")
        writer.close()


async def test_it_leaves_the_socket_and_takes_no_connection_after_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reception = Reception(build_reception(Deployment(), Metrics()), Config())
        await reception.open(listener)
        host, port = listener.getsockname()
        idle_reader, idle_writer = await asyncio.open_connection(host, port)
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            assert (await http.get(f"http://{host}:{port}/live")).status_code == 200
            reception.close()
            assert await asyncio.wait_for(idle_reader.read(), WAIT_S) == b""
            idle_writer.close()
            asking = asyncio.ensure_future(http.get(f"http://{host}:{port}/live"))
            listener.setblocking(False)
            accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
            accepted.sendall(b"HTTP/1.1 204 Of Another\r\n\r\n")
            assert (await asking).status_code == 204
            accepted.close()


async def test_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "all.pem")
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    pem = str(tmp_path / "all.pem")
    config = Config(tls=TlsConfig(ssl_keyfile=pem, ssl_certfile=pem))
    async with received(config) as (_, address), httpx.AsyncClient(verify=trust, timeout=WAIT_S) as http:
        assert (await http.get(f"https://{address}/live")).json() == {"status": "ok"}


@pytest.mark.parametrize("logs_access", [True, False])
async def test_refusals_are_in_the_access_log(logs_access: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(server=ServerConfig(access_log=logs_access))
    async with received(config) as (_, address), httpx.AsyncClient(timeout=WAIT_S) as http:
        with caplog.at_level("INFO"):
            await http.post(f"http://{address}/v1/completions", content=json.dumps({"prompt": "x"}))
    written = [record.message for record in caplog.records if record.name.startswith("streamserve")]
    assert any("/v1/completions" in line for line in written) == logs_access
