"""The real process: what it imports, how it starts, drains and dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from streamserve.bootstrap import STOP_ORDER, Bootstrap, Channel, ResolvedModel
from streamserve.config import Config
from streamserve.frontend.metrics import Layout
from streamserve.ipc.notice import Notice
from streamserve.ipc.segment import Segment

WAIT_S = 60.0
MAX_RSS_BYTES = 250 * 2**20
CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 400}


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, streamserve.frontend.process\n"
        "print([name for name in ('torch', 'transformers', 'streamserve.worker') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Process:
    """A frontend process whose supervisor is the test.

    Attributes:
        bring_model: tells it what it serves.
    """

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        ready: asyncio.StreamReader,
        lifeline: int,
        bring_model: Callable[[], None],
    ) -> None:
        self.child = child
        self.ready = ready
        self.lifeline = lifeline
        self.bring_model = bring_model
        self.url = ""

    async def report(self) -> Any:
        """The next line on the ready pipe."""
        return json.loads(await asyncio.wait_for(self.ready.readline(), WAIT_S))

    async def exit_code(self) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.child.wait), WAIT_S)


@asynccontextmanager
async def spawned(
    harness: Any, folder: Path, drain_timeout_s: float, *, knows_model: bool = True
) -> AsyncIterator[Process]:
    listener = socket.create_server(("127.0.0.1", 0))
    lifeline, lifeline_end = os.pipe()
    ready_end, ready = os.pipe()
    requests, deltas = harness.segments
    progress = Notice.create("test", 4096)
    progress.publish(b'{"stage": "loading weights", "fraction": 0.5}')
    metrics = Segment.create("test", Layout().segment_bytes(1))
    notice = Notice.create("test", 4096)

    def bring_model() -> None:
        ResolvedModel(folder, "tiny", "float32", "dummy").publish(notice)
        harness.frontend_bell.ring()

    if knows_model:
        bring_model()
    config = Config().to_dict()
    config["supervisor"]["drain_timeout"] = drain_timeout_s
    bootstrap = Bootstrap(
        role="frontend",
        index=0,
        epoch=1,
        secret=bytes(32).hex(),
        config=config,
        channels=(
            Channel(requests.fd, deltas.fd, harness.frontend_bell.fileno(), harness.engine_bell.fileno()),
        ),
        lifeline=lifeline,
        ready=ready,
        model=notice.fd,
        board=harness.engine.board.fd,
        listen=listener.fileno(),
        progress=progress.fd,
        metrics=metrics.fd,
    )
    fd = bootstrap.write()
    child = subprocess.Popen(  # noqa: ASYNC220  (waited for in a thread)
        [sys.executable, "-m", "streamserve.frontend.process", "--bootstrap", str(fd)],
        pass_fds=(fd, *bootstrap.descriptors()),
    )
    for end in (fd, lifeline, ready):
        os.close(end)
    progress.close()
    metrics.close()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ready_end, "rb")
    )
    process = Process(child, reader, lifeline_end, bring_model)
    process.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    harness.engine.start()
    try:
        yield process
    finally:
        harness.engine.stop()
        if process.lifeline >= 0:
            os.close(process.lifeline)
        if child.poll() is None:
            child.kill()
        child.wait()
        transport.close()
        notice.close()


async def wait_for_health(http: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await http.get("/health")).status_code != status:  # noqa: ASYNC110  (in another process)
            await asyncio.sleep(0.01)


async def wait_for_drain(url: str) -> None:
    """Asks anew until the answer is that the server is draining."""
    async with asyncio.timeout(WAIT_S):
        while True:
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
                try:
                    response = await http.get("/ready")
                except httpx.TransportError:
                    # The connection was idle at the moment when idle ones were closed.
                    continue
            if response.json()["status"] == "draining":
                assert response.status_code == 503
                assert response.headers["connection"] == "close"
                return


async def test_it_answers_before_the_model_is_there(make_harness: Any, model_folder: Path) -> None:
    harness = make_harness()
    harness.engine.is_automatic = False
    async with (
        spawned(harness, model_folder, 30, knows_model=False) as process,
        httpx.AsyncClient(base_url=process.url, timeout=WAIT_S) as http,
    ):
        progress = {"status": "loading", "progress": {"stage": "loading weights", "fraction": 0.5}}
        for method, path in (("GET", "/ready"), ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            unready = await http.request(method, path)
            assert unready.status_code == 503
            assert unready.json() == progress
            assert unready.headers["cache-control"] == "no-store"
        live = await http.get("/live")
        assert (live.status_code, live.json()) == (200, {"status": "ok"})
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("DELETE", "/nowhere"),
        ):
            refused = await http.request(method, path, headers={"X-Request-Id": "mine"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
            assert refused.headers["x-request-id"] == "mine"
            assert refused.json()["error"] == {
                "message": "The model is not here yet; try again soon.",
                "type": "service_unavailable_error",
                "param": None,
                "code": "engine_unavailable",
            }
        with pytest.raises(InvalidStatus) as turned_down:
            await connect(process.url.replace("http", "ws") + "/v1/ws")
        assert turned_down.value.response.status_code == 503
        # A connection that was opened before is not left with an application that never changes.
        reader, writer = await asyncio.open_connection(*process.url.removeprefix("http://").split(":"))
        await http.get("/live")
        process.bring_model()
        assert (await process.report())["type"] == "ready"
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
        harness.engine.hello()
        await wait_for_health(http, 200)
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        counted = (await http.get("/metrics")).text
        assert 'http_requests_total{handler="none",method="GET",status="5xx"} 2.0' in counted


async def test_a_model_that_is_there_first_is_not_preceded_by_anything(
    make_harness: Any, model_folder: Path
) -> None:
    """Connections wait instead: who asks a successor must not hear that there is no model."""
    harness = make_harness()
    harness.engine.hello()
    async with (
        spawned(harness, model_folder, 30) as process,
        httpx.AsyncClient(base_url=process.url, timeout=WAIT_S) as http,
    ):
        assert (await http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("how", [STOP_ORDER, "lifeline"])
async def test_it_ends_at_once_while_the_model_is_on_its_way(
    make_harness: Any, model_folder: Path, how: Any
) -> None:
    async with spawned(make_harness(), model_folder, 1000, knows_model=False) as process:
        async with httpx.AsyncClient(base_url=process.url, timeout=WAIT_S) as http:
            assert (await http.get("/live")).status_code == 200
        if how == "lifeline":
            os.close(process.lifeline)
            process.lifeline = -1
        else:
            process.child.send_signal(how)
        assert await process.exit_code() == (1 if how == "lifeline" else -how)


async def test_it_serves_before_the_engine_is_there_and_drains_on_sigterm(
    make_harness: Any, model_folder: Path
) -> None:
    harness = make_harness()
    engine = harness.engine
    engine.is_automatic = False
    async with spawned(harness, model_folder, 30) as process:
        assert (await process.report())["type"] == "ready"
        async with httpx.AsyncClient(base_url=process.url, timeout=WAIT_S) as http:
            loading = await http.get("/ready")
            assert loading.status_code == 503
            assert loading.json() == {
                "status": "loading",
                "progress": {"stage": "loading weights", "fraction": 0.5},
            }
            refused = await http.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            engine.hello()
            await wait_for_health(http, 200)
            asked = asyncio.ensure_future(http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3}))
            await engine.until(lambda: len(engine.adds) == 1)
            engine.step()
            assert psutil.Process(process.child.pid).memory_info().rss < MAX_RSS_BYTES
            process.child.send_signal(STOP_ORDER)
            await wait_for_drain(process.url)
            async with httpx.AsyncClient(base_url=process.url, timeout=WAIT_S) as newcomer:
                refused = await newcomer.post("/v1/chat/completions", json=CHAT)
                assert refused.status_code == 503
                assert (await newcomer.get("/live")).status_code == 200
            while engine.step():
                pass
            assert (await asked).text.endswith("data: [DONE]\n\n")
        assert await process.exit_code() == 0


async def test_what_is_not_finished_in_time_ends_with_an_error_event(
    make_harness: Any, model_folder: Path, events: Any
) -> None:
    harness = make_harness()
    engine = harness.engine
    engine.is_automatic = False
    engine.hello()
    async with spawned(harness, model_folder, 0.2) as process:
        await process.report()
        async with httpx.AsyncClient(base_url=process.url, timeout=WAIT_S) as http:
            await wait_for_health(http, 200)
            request = http.build_request("POST", "/v1/chat/completions", json=CHAT)
            sending = asyncio.ensure_future(http.send(request, stream=True))
            await engine.until(lambda: len(engine.adds) == 1)
            engine.step()
            response = await sending
            process.child.send_signal(STOP_ORDER)
            body = (await response.aread()).decode()
        assert events(body)[-1]["error"]["code"] == "engine_unavailable"
        assert await process.exit_code() == 0
        await engine.until(lambda: bool(engine.aborts))


@pytest.mark.parametrize("how", [STOP_ORDER, signal.SIGTERM, "lifeline"])
async def test_it_can_be_ended_at_once(make_harness: Any, model_folder: Path, how: Any) -> None:
    harness = make_harness()
    engine = harness.engine
    engine.is_automatic = False
    engine.hello()
    async with spawned(harness, model_folder, 1000) as process:
        await process.report()
        async with httpx.AsyncClient(base_url=process.url, timeout=WAIT_S) as http:
            await wait_for_health(http, 200)
            asked = asyncio.ensure_future(http.post("/v1/chat/completions", json=CHAT))
            await engine.until(lambda: len(engine.adds) == 1)
            if how == "lifeline":
                os.close(process.lifeline)
                process.lifeline = -1
            else:
                process.child.send_signal(how)
                await wait_for_drain(process.url)
                process.child.send_signal(how)
            assert await process.exit_code() == (1 if how == "lifeline" else 128 + how)
            with pytest.raises(httpx.TransportError):
                await asked


async def test_a_model_that_cannot_be_read_is_one_line_on_the_ready_pipe(
    make_harness: Any, tmp_path: Path
) -> None:
    async with spawned(make_harness(), tmp_path, 1) as process:
        report = await process.report()
        assert report["type"] == "failed"
        assert "tokenizer.json" in report["message"]
        assert "\n" not in report["message"]
        assert await process.exit_code() == 2
