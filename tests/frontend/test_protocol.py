"""Limits on the request head, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from streamserve.frontend import farewell


@pytest.fixture
async def url(run_harness: Any) -> AsyncIterator[str]:
    async with run_harness() as frontend, frontend.served() as url:
        yield url


@pytest.fixture
async def impatient_url(run_harness: Any) -> AsyncIterator[str]:
    """Of a server that waits for no head and no rest of a body."""
    async with run_harness() as frontend, frontend.served(head_timeout=0.1) as url:
        yield url


async def exchange(url: str, pieces: list[bytes], wait_for_all: bool = True) -> bytes:
    """Sends `pieces` until the server hangs up or answers, and gives back all it said."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(10):
            while chunk := await reader.read(65536):
                said += chunk
                if not wait_for_all and b"}" in said:
                    break
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return said


async def exchange_in_turns(url: str, requests: list[list[bytes]]) -> list[bytes]:
    """Sends each request's pieces on one connection once the one before it is answered, with JSON."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answers = []
    try:
        for pieces in requests:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            async with asyncio.timeout(60):
                answers.append(await reader.readuntil(b"}"))
                if b'"error"' in answers[-1]:
                    await reader.readuntil(b"}")
    finally:
        writer.transport.abort()
    return answers


def status_of(said: bytes) -> int:
    return int(said.split(b" ", 2)[1])


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


async def test_a_small_head_is_fine_piece_by_piece(url: str) -> None:
    said = await exchange(url, [bytes([byte]) for byte in GET + b"connection: close\r\n\r\n"])
    assert status_of(said) == 200


@pytest.mark.parametrize(
    "pieces",
    [
        [GET, b"x: ", *[b"a" * 16384] * 8],
        [GET, *[b"x: y\r\n" * 1000] * 8],
        [GET, *[b"x: " + b"a" * 8000 + b"\r\n"] * 20, b"\r\n"],
        [b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n"],
    ],
    ids=["one long header", "many headers", "many long headers", "a long target"],
)
async def test_a_head_over_the_limit_is_refused_early(url: str, pieces: list[bytes]) -> None:
    assert status_of(await exchange(url, [*pieces, *[b"a" * 65536] * 200])) == 431
    assert status_of(await exchange(url, [GET + b"connection: close\r\n\r\n"])) == 200


async def test_a_head_just_over_the_limit_gets_the_json_error(url: str) -> None:
    said = await exchange(url, [GET + b"x: y\r\n" * 200 + b"\r\n"])
    assert status_of(said) == 431
    assert b'"code":"request_header_fields_too_large"' in said
    assert b"x-request-id: " in said


@pytest.mark.parametrize("more", [[], [b"hello" * 10_000] * 200], ids=["no more", "and more"])
async def test_what_is_no_http_gets_a_json_400(url: str, more: list[bytes]) -> None:
    said = await exchange(url, [b"hello\r\n\r\n", *more])
    assert status_of(said) == 400
    assert b'"error"' in said


@pytest.mark.parametrize("more", [[], [b"z" * 65536] * 200], ids=["no more", "and more"])
async def test_a_chunk_that_is_none_ends_the_request(
    url: str, more: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    said = await exchange(url, [head, b"2\r\n{}\r\n", b"zz\r\n", *more])
    assert status_of(said) == 400
    assert said.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


TOO_MUCH = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n"


@pytest.mark.parametrize("said", [b"hello\r\n\r\n", TOO_MUCH], ids=["no HTTP", "too much"])
@pytest.mark.parametrize(
    ("limit", "value", "pause_s"),
    [("MAX_S", 0.05, 0.01), ("MAX_SILENCE_S", 0.05, 0.5), ("MAX_BYTES", 10_000, 0)],
)
async def test_who_is_refused_and_stays_is_cut_off(
    url: str, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, pause_s: float, said: bytes
) -> None:
    monkeypatch.setattr(farewell, limit, value)
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"a" * 1000)
                await writer.drain()
                await asyncio.sleep(pause_s)
    writer.transport.abort()


async def test_a_head_that_does_not_come_times_out(impatient_url: str) -> None:
    assert status_of(await exchange(impatient_url, [GET])) == 408
    assert status_of(await exchange(impatient_url, [])) == 408


async def test_a_body_that_goes_on_after_its_answer_is_cut_off(impatient_url: str) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
    said = await exchange(impatient_url, [head])
    # The server has hung up, or this would not have come back.
    assert status_of(said) == 404


CHUNKED = (
    b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize("begin", [b"2\r\n{}\r\n0\r\nX-Trailer: ", b"2\r\n{}\r\n2;extension="])
async def test_what_never_ends_behind_a_body_is_refused(url: str, begin: bytes) -> None:
    pieces = [CHUNKED % b"/v1/completions" + begin, *[b"a" * 8192] * 1000]
    said = await exchange(url, pieces, wait_for_all=False)
    assert status_of(said) == 431


async def test_trailers_after_the_answer_are_cut_off(url: str) -> None:
    pieces = [CHUNKED % b"/nowhere" + b"2\r\n{}\r\n0\r\nX-Trailer: ", *[b"a" * 8192] * 1000]
    # The server has hung up, or this would not have come back.
    await exchange(url, pieces)


async def test_short_trailers_are_no_trouble(url: str) -> None:
    pieces = [CHUNKED % b"/nowhere" + b"2;a=b\r\n{}\r\n0\r\nX-Trailer: a\r\n\r\n"]
    assert status_of(await exchange(url, pieces, wait_for_all=False)) == 404


async def test_a_body_that_ends_after_its_answer_is_no_trouble(impatient_url: str) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\n"
    answers = await exchange_in_turns(
        impatient_url, [[head], [b"{", b"}\n", GET + b"connection: close\r\n\r\n"]]
    )
    assert [status_of(answer) for answer in answers] == [404, 200]


@pytest.mark.parametrize(
    ("options", "pieces", "status"),
    [
        ({"max_headers": 8}, [GET + b"x: y\r\n" * 9 + b"\r\n"], 431),
        ({"max_head_bytes": 1024}, [GET + b"x: " + b"y" * 1024 + b"\r\n\r\n"], 431),
        (
            {"max_head_bytes": 200_000},
            [GET + b"x: " + b"y" * 100_000 + b"\r\nconnection: close\r\n\r\n"],
            200,
        ),
    ],
)
async def test_limits_of_a_head_are_options(
    run_harness: Any, options: dict[str, int], pieces: list[bytes], status: int
) -> None:
    async with run_harness() as frontend, frontend.served(**options) as url:
        assert status_of(await exchange(url, pieces)) == status


async def test_a_body_that_does_not_come_times_out(run_harness: Any) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
    async with run_harness(body_timeout_s=0.05) as frontend, frontend.served() as url:
        said = await exchange(url, [head, b"{"])
    assert status_of(said) == 408
    assert b"connection: close" in said.lower()


async def test_a_declared_body_over_the_limit_is_not_waited_for(url: str) -> None:
    assert status_of(await exchange(url, [TOO_MUCH])) == 413


async def test_a_connection_is_used_again(url: str) -> None:
    answers = await exchange_in_turns(url, [[GET + b"\r\n"], [GET + b"connection: close\r\n\r\n"]])
    assert [status_of(answer) for answer in answers] == [200, 200]


def post(body: bytes, path: bytes = b"/v1/completions") -> bytes:
    head = (
        b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % (path, len(body)) + body


STREAM = b'{"prompt":"go on","max_tokens":3,"stream":true}'
WHOLE = b'{"prompt":"go on","max_tokens":100}'


@pytest.mark.parametrize(
    "more",
    [
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /he",
        b"\xff\xfegarbage\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 90_000,
    ],
    ids=["another request", "half a head", "no HTTP", "a head over the limit"],
)
async def test_nothing_is_written_into_an_answer(run_harness: Any, more: bytes) -> None:
    async with run_harness() as frontend, frontend.served(head_timeout=0.2) as url:
        frontend.engine.is_automatic = False
        exchanged = asyncio.ensure_future(exchange(url, [post(STREAM), more]))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        frontend.engine.step()
        await asyncio.sleep(0.5)
        frontend.engine.is_automatic = True
        frontend.engine.step()
        said = await exchanged
        assert said.count(b"HTTP/1.1 ") == 1
        assert b"data: [DONE]" in said
        assert said.endswith(b"0\r\n\r\n")


async def test_a_client_that_left_is_noticed_behind_a_second_request(run_harness: Any) -> None:
    async with run_harness() as frontend, frontend.served() as url:
        frontend.engine.is_automatic = False
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(post(WHOLE) + GET + b"\r\n" + post(WHOLE))
        await frontend.engine.until(lambda: len(frontend.engine.adds) == 1)
        writer.transport.abort()
        await frontend.engine.until(lambda: len(frontend.engine.aborts) == 1)
        assert len(frontend.engine.adds) == 1


async def test_a_big_body_and_the_next_head_in_one_piece(url: str) -> None:
    """The bytes of a body are none of the head behind it."""
    refused = post(b'{"prompt":"' + b"x" * 100_000 + b'","n":-1}')
    said = await exchange(url, [refused, GET + b"connection: close\r\n\r\n"])
    assert status_of(said) == 400
