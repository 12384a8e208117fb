"""Streams that outlive their connections, in a frontend whose engine the test steers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers, QueryParams

from streamserve.config import ApiConfig
from streamserve.errors import InvalidRequest
from streamserve.frontend.api.problems import Problem
from streamserve.frontend.api.resume import NumberedFraming, position_of
from streamserve.frontend.resume.reading import Ending

BODY = {"prompt": "hello", "stream": True, "max_tokens": 50, "ignore_eos": True}
ASK = {"x-stream-resume": "1", "x-request-id": "one"}
PATH = "/v1/streams/cmpl-one"
WAIT_S = 60.0


@asynccontextmanager
async def serving(
    run_harness: Callable[..., Any], window_s: float = 3600.0, **options: Any
) -> AsyncIterator[Any]:
    """A frontend on a real socket, and a client of it; the engine makes a step when it is told to."""
    api = ApiConfig(resume_window=window_s)
    async with run_harness(api=api, **options) as frontend:
        async with frontend.served() as url:
            frontend.engine.is_automatic = False
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
                frontend.client_http = http
                yield frontend
        await frontend.service.kept.close()


async def begin(frontend: Any, headers: dict[str, str] = ASK, **fields: Any) -> httpx.Response:
    """A stream whose head and first event have come."""
    http = frontend.client_http
    request = http.build_request("POST", "/v1/completions", json={**BODY, **fields}, headers=headers)
    sending = asyncio.ensure_future(http.send(request, stream=True))
    count = len(frontend.engine.adds) + 1
    await frontend.engine.until(lambda: len(frontend.engine.adds) == count)
    frontend.engine.step()
    return await sending


async def cut(frontend: Any, response: httpx.Response) -> None:
    await response.aclose()
    await frontend.until(lambda: frontend.service.registry.metrics.resume.detached.value == 1)


async def finish(frontend: Any) -> None:
    """Runs the engine to the end of all requests."""
    while frontend.engine.step():  # noqa: ASYNC110  (one turn a step)
        await asyncio.sleep(0)


async def test_who_does_not_come_back_is_aborted_once(run_harness: Any) -> None:
    async with serving(run_harness, window_s=0.05) as frontend:
        response = await begin(frontend)
        assert response.headers["x-stream-id"] == "cmpl-one"
        await response.aclose()
        await frontend.engine.until(lambda: frontend.engine.aborts)
        await frontend.until(lambda: not frontend.streams)
        assert len(frontend.engine.aborts) == 1
        assert frontend.service.registry.metrics.finished["abort"].value == 1


async def test_a_client_that_leaves_before_the_first_token_can_come_back(run_harness: Any) -> None:
    async with serving(run_harness) as frontend:
        http = frontend.client_http
        posting = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=ASK))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)
        await frontend.until(lambda: frontend.service.registry.metrics.resume.detached.value == 1)
        assert (await http.get(PATH)).json()["status"] == "detached"
        coming = asyncio.create_task(http.get(PATH, headers={"accept": "text/event-stream"}))
        await frontend.until(lambda: frontend.service.registry.metrics.resume.detached.value == 0)
        await finish(frontend)
        answer = await coming
        assert answer.text.startswith("id: cmpl-one:1\ndata: {")
        assert answer.text.endswith("data: [DONE]\n\n")
        assert not frontend.engine.aborts


async def test_the_first_of_two_that_wait_is_told(run_harness: Any) -> None:
    async with serving(run_harness) as frontend:
        http = frontend.client_http
        posting = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=ASK))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        coming = asyncio.create_task(http.get(PATH, headers={"accept": "text/event-stream"}))
        lost = await posting
        assert (lost.status_code, lost.json()["error"]["code"]) == (409, "stream_taken")
        await finish(frontend)
        assert (await coming).text.endswith("data: [DONE]\n\n")


async def test_deleting_it_aborts_once_and_leaves_its_end(run_harness: Any) -> None:
    async with serving(run_harness) as frontend:
        http = frontend.client_http
        await cut(frontend, await begin(frontend))
        assert (await http.delete(PATH)).json()["status"] == "cancelled"
        answer = await http.get(PATH, headers={"accept": "text/event-stream"})
        last = json.loads(answer.text.split("data: ")[-2].partition("\n")[0])
        assert last["choices"][0]["finish_reason"] == "abort"
        assert len(frontend.engine.aborts) == 1
        assert (await http.delete(PATH)).status_code == 404


async def test_a_failure_of_the_engine_is_kept_as_the_end(run_harness: Any) -> None:
    async with serving(run_harness) as frontend:
        http = frontend.client_http
        await cut(frontend, await begin(frontend))
        frontend.client.fail_all("The engine died.")
        await frontend.until(lambda: not frontend.streams)
        for _ in range(2):
            answer = await http.get(PATH, headers={"last-event-id": "cmpl-one:1"})
            assert json.loads(answer.text.split("data: ")[-1])["error"]["code"] == "engine_unavailable"


async def test_a_request_that_is_turned_away_can_be_sent_again(run_harness: Any) -> None:
    async with serving(run_harness, max_waiting=1) as frontend:
        http = frontend.client_http
        first = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        for _ in range(2):
            refused = await http.post("/v1/completions", json=BODY, headers=ASK)
            assert refused.status_code == 429
            assert "retry-after" in refused.headers
            assert (await http.get(PATH, headers={"accept": "text/event-stream"})).status_code == 404
        await finish(frontend)
        await first


async def test_tokens_go_on_in_the_turn_they_come_in(run_harness: Any) -> None:
    async with serving(run_harness) as frontend:
        response = await begin(frontend)
        stream = frontend.service.kept.find("cmpl-one", "")
        await frontend.until(lambda: stream._take is not None)
        for _ in range(5):
            before = stream.log.last
            frontend.engine.step()
            await frontend.until(lambda before=before: stream.log.last > before)
            # Nobody had to be woken to take it.
            assert stream._take is not None
        await finish(frontend)
        text = (await response.aread()).decode()
        assert text.endswith("data: [DONE]\n\n")


async def test_head_takes_nothing_from_anybody(run_harness: Any) -> None:
    async with serving(run_harness) as frontend:
        response = await begin(frontend)
        await frontend.client_http.head(PATH, headers={"accept": "text/event-stream"})
        # Nor does a GET that only wants to know.
        for accepted in ("*/*", "application/json", "image/png"):
            answer = await frontend.client_http.get(PATH + "?after=0", headers={"accept": accepted})
            assert answer.json()["status"] == "running"
        await finish(frontend)
        assert (await response.aread()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_no_other_page_takes_a_stream(run_harness: Any, site: str) -> None:
    async with serving(run_harness) as frontend:
        http, response = frontend.client_http, await begin(frontend)
        accept = {"accept": "text/event-stream"}
        for about in ({"origin": "https://evil.example"}, {"sec-fetch-site": site}):
            refused = await http.get(PATH, headers={**accept, **about})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
        await finish(frontend)
        assert (await response.aread()).endswith(b"data: [DONE]\n\n")
        for about in ({"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, {}):
            assert (await http.get(PATH, headers={**accept, **about})).status_code == 200


async def test_what_fails_before_it_begins_leaves_nothing(run_harness: Any) -> None:
    async with serving(run_harness) as frontend:
        http = frontend.client_http
        posting = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=ASK))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        frontend.client.fail_all("The engine died.")
        assert (await posting).status_code == 503
        assert len(frontend.service.kept) == 0


IDS = st.text("abc:.-", min_size=1, max_size=6)


@given(stream=IDS, number=st.integers(0, 10**18 - 1))
def test_the_id_of_an_event_says_where_it_is(stream: str, number: int) -> None:
    headers = Headers({"last-event-id": f"{stream}:{number}"})
    assert position_of(stream, headers, QueryParams("after=3")) == number
    assert position_of(stream, Headers(), QueryParams(f"after={number}")) == number
    with pytest.raises(InvalidRequest):
        position_of(stream + "x", headers, QueryParams())


@given(stream=IDS, last=st.text(st.characters(max_codepoint=255), max_size=12))
def test_whatever_an_id_is_it_is_a_number_or_refused(stream: str, last: str) -> None:
    try:
        number = position_of(stream, Headers({"last-event-id": last}), QueryParams())
    except InvalidRequest:
        return
    assert not last or last == f"{stream}:{last.rpartition(':')[2]}"
    assert number >= 0


@given(st.lists(st.text(max_size=10), min_size=1, max_size=4), st.integers(1, 10**6), st.booleans())
def test_events_have_ids_and_are_read_as_they_were(texts: list[str], first: int, names_events: bool) -> None:
    framing = NumberedFraming("cmpl-x:y", names_events=names_events)
    batch = [
        json.dumps({"type": "a.b", "text": text}, ensure_ascii=False, separators=(",", ":")).encode()
        for text in texts
    ]
    said = framing.events(first, batch).decode()
    blocks = said.removesuffix("\n\n").split("\n\n")
    for number, (block, text) in enumerate(zip(blocks, texts, strict=True), first):
        lines = block.split("\n")
        assert lines[0] == f"id: cmpl-x:y:{number}"
        assert lines[1:-1] == (["event: a.b"] if names_events else [])
        assert json.loads(lines[-1].removeprefix("data: "))["text"] == text
    done = framing.ending(Ending(9, None))
    assert done == (b"" if names_events else b"id: cmpl-x:y:9\ndata: [DONE]\n\n")
    failed = framing.ending(Ending(9, Problem(500, "t", "c", "m")))
    assert failed.startswith(b"id: cmpl-x:y:9\ndata: {") != names_events
