"""Streams whose first event has to be waited for: what comes meanwhile, and how they fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from streamserve.config import ApiConfig
from streamserve.messages import Finish

WAIT_S = 60.0
PING = ": ping"
WAYS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
}
KEPT = {"X-Stream-Resume": "1", "X-Request-Id": "one"}
IDS = {"/v1/completions": "cmpl-one", "/v1/chat/completions": "chatcmpl-one", "/v1/responses": "resp_one"}
EVENTS = {"Accept": "text/event-stream"}
ALL_WAYS = pytest.mark.parametrize("path", WAYS)
BOTH = pytest.mark.parametrize("headers", [{}, KEPT], ids=["ordinary", "kept"])


@asynccontextmanager
async def serving(run_harness: Callable[..., Any], ping_interval_s: float) -> AsyncIterator[Any]:
    """A frontend on a real socket, and a client of it; the engine makes a step when it is told to."""
    api = ApiConfig(resume_window=3600.0)
    async with run_harness(api=api, ping_interval_s=ping_interval_s) as frontend:
        async with frontend.served() as url:
            frontend.engine.is_automatic = False
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
                frontend.client_http = http
                yield frontend
        await frontend.service.kept.close()


class Lines:
    """The lines of a stream that is open."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def until(self, start: str) -> str:
        """The next line that begins so."""
        async with asyncio.timeout(WAIT_S):
            async for line in self._lines:
                if line.startswith(start):
                    return line
        raise AssertionError("the stream is over")

    async def rest(self) -> list[str]:
        async with asyncio.timeout(WAIT_S):
            return [line async for line in self._lines if line and line != PING]


@asynccontextmanager
async def posted(frontend: Any, path: str, headers: dict[str, str]) -> AsyncIterator[Lines]:
    body = {**WAYS[path], "stream": True}
    async with frontend.client_http.stream("POST", path, json=body, headers=headers) as response:
        yield Lines(response)


@asynccontextmanager
async def resumed(frontend: Any, path: str) -> AsyncIterator[Lines]:
    """Another connection to a stream of which nothing has come and which nobody waits for."""
    body = {**WAYS[path], "stream": True}
    posting = asyncio.ensure_future(frontend.client_http.post(path, json=body, headers=KEPT))
    await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
    posting.cancel()
    await asyncio.wait([posting])
    async with frontend.client_http.stream("GET", f"/v1/streams/{IDS[path]}", headers=EVENTS) as response:
        yield Lines(response)


@ALL_WAYS
@BOTH
async def test_a_request_that_waits_for_long_is_told_that_it_does(
    run_harness: Any, path: str, headers: dict[str, str]
) -> None:
    async with serving(run_harness, 0.05) as frontend, posted(frontend, path, headers) as lines:
        # No step was made.
        assert lines.response.status_code == 200
        assert lines.response.headers.get("x-stream-id") == (IDS[path] if headers else None)
        for _ in range(3):
            await lines.until(PING)
        frontend.engine.is_automatic = True
        frontend.engine._wake()
        rest = await lines.rest()
        assert not any('"error":{' in line for line in rest)
        assert "[DONE]" in rest[-1] or "response.completed" in rest[-1] or "incomplete" in rest[-1]


@ALL_WAYS
async def test_who_comes_back_knows_at_once_that_the_stream_is_there(run_harness: Any, path: str) -> None:
    async with serving(run_harness, 3600.0) as frontend, resumed(frontend, path) as lines:
        assert lines.response.status_code == 200
        assert lines.response.headers["x-stream-id"] == IDS[path]
        await lines.until(PING)
        frontend.engine.is_automatic = True
        frontend.engine._wake()
        first = (await lines.rest())[0]
        assert first == f"id: {IDS[path]}:1"


async def test_a_stream_of_which_something_is_held_begins_with_that(run_harness: Any) -> None:
    async with serving(run_harness, 3600.0) as frontend:
        frontend.engine.is_automatic = True
        async with posted(frontend, "/v1/completions", KEPT) as lines:
            await lines.rest()
        back = await frontend.client_http.get("/v1/streams/cmpl-one", headers=EVENTS)
        assert back.text.startswith("id: cmpl-one:1\n")


@ALL_WAYS
@BOTH
async def test_what_goes_wrong_soon_has_its_status(
    run_harness: Any, path: str, headers: dict[str, str]
) -> None:
    async with serving(run_harness, 3600.0) as frontend:
        body = {**WAYS[path], "stream": True}
        posting = asyncio.ensure_future(frontend.client_http.post(path, json=body, headers=headers))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        frontend.engine.finish(frontend.engine.adds[0].stream, Finish.EXPIRED)
        answer = await posting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_time_exceeded")


def check_refusal(path: str, rest: list[str]) -> None:
    """One event without a number, which says what the status would have said."""
    named = path == "/v1/responses"
    assert [line.partition(":")[0] for line in rest] == [*(["event"] if named else []), "data"]
    event = json.loads(rest[-1].removeprefix("data: "))
    assert (event["error"]["code"], event["error"]["status"]) == ("queue_time_exceeded", 503)
    assert event["error"]["retry_after"] >= 1
    if named:
        assert rest[0] == "event: error"
        assert (event["type"], event["code"]) == ("error", "queue_time_exceeded")


@ALL_WAYS
@BOTH
async def test_what_goes_wrong_later_is_the_only_event(
    run_harness: Any, path: str, headers: dict[str, str]
) -> None:
    async with serving(run_harness, 0.05) as frontend, posted(frontend, path, headers) as lines:
        await lines.until(PING)
        frontend.engine.finish(frontend.engine.adds[0].stream, Finish.EXPIRED)
        check_refusal(path, await lines.rest())
        if headers:
            # There is nothing to come back to.
            back = await frontend.client_http.get(f"/v1/streams/{IDS[path]}", headers=EVENTS)
            assert back.status_code == 404


@ALL_WAYS
async def test_what_goes_wrong_after_coming_back_is_the_only_event(run_harness: Any, path: str) -> None:
    async with serving(run_harness, 3600.0) as frontend, resumed(frontend, path) as lines:
        await lines.until(PING)
        frontend.engine.finish(frontend.engine.adds[0].stream, Finish.EXPIRED)
        check_refusal(path, await lines.rest())


@ALL_WAYS
async def test_leaving_while_waiting_aborts_once(run_harness: Any, path: str) -> None:
    async with serving(run_harness, 0.05) as frontend:
        async with posted(frontend, path, {}) as lines:
            await lines.until(PING)
        await frontend.engine.until(lambda: bool(frontend.engine.aborts))
        assert frontend.engine.aborts == [frontend.engine.adds[0].stream]
        await frontend.until(lambda: not frontend.streams)
