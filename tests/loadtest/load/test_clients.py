"""The clients on plain sockets, against a real server and against one that misbehaves."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from loadtest.load.answers import Answer
from loadtest.load.sse import SseClient, StreamFailed
from loadtest.load.websocket import WebSocketClient
from streamserve.bench.http import Address

PATIENCE_S = 120.0


@dataclass
class Notes:
    """Keeps what it is told."""

    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def first_token(self, milliseconds: float) -> None:
        self.first_tokens.append(milliseconds)

    def gap(self, milliseconds: float) -> None:
        self.gaps.append(milliseconds)

    def tokens(self, count: int) -> None:
        self.num_tokens += count


def delta(content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}}]}


def body(max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def test_times_are_between_events_with_text() -> None:
    notes = Notes()
    answer = Answer(10.0, notes)
    answer.chunk(10.25, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    answer.chunk(10.5, delta("a"))
    answer.chunk(10.75, delta("b"))
    answer.chunk(12.75, delta("c"))
    answer.chunk(20.0, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    answer.chunk(20.0, {"choices": [], "usage": {"completion_tokens": 5}})
    answer.finish()
    assert (notes.first_tokens, notes.gaps, notes.num_tokens) == ([500.0], [250.0, 2000.0], 5)
    assert answer.problem == ""


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_thought_is_text_too(name: str) -> None:
    notes = Notes()
    answer = Answer(10.0, notes)
    answer.chunk(10.0, {"choices": None})
    answer.chunk(10.5, {"choices": [{"index": 0, "delta": {name: "hm", "content": None}}]})
    answer.chunk(11.0, delta("a"))
    answer.finish()
    assert (notes.first_tokens, notes.gaps, answer.problem) == ([500.0], [500.0], "")


def test_no_text_and_errors_are_problems() -> None:
    silent = Answer(0.0, Notes())
    silent.finish()
    assert silent.problem == "no text came"
    broken = Answer(0.0, Notes())
    broken.chunk(1.0, {"error": {"message": "The engine died."}})
    broken.finish()
    assert broken.problem == "the stream says: The engine died."


def test_sse_with_a_real_server_on_one_connection(tiny_server: Any) -> None:
    notes = Notes()
    client = SseClient(Address.of(tiny_server.url, "/v1/chat/completions"), {}, PATIENCE_S)
    for _ in range(3):
        assert client.ask(orjson.dumps(body()), Answer(0.0, notes)) > 100
    with pytest.raises(StreamFailed, match=r"HTTP 404: .*no-such"):
        client.ask(orjson.dumps(body(model="no-such")), Answer(0.0, notes))
    assert client.ask(orjson.dumps(body()), Answer(0.0, notes))
    client.close()
    assert notes.num_tokens == 4 * 8
    assert len(notes.first_tokens) == 4


def test_websocket_with_a_real_server_many_at_once(tiny_server: Any) -> None:
    notes = [Notes() for _ in range(6)]
    client = WebSocketClient(Address.of(tiny_server.url, "/v1/ws"), {}, PATIENCE_S)
    threads = [
        threading.Thread(target=client.ask, args=(body(max_tokens=20 + number), Answer(0.0, each)))
        for number, each in enumerate(notes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [each.num_tokens for each in notes] == [20, 21, 22, 23, 24, 25]
    with pytest.raises(StreamFailed, match=r"^404 .*no-such"):
        client.ask(body(model="no-such"), Answer(0.0, Notes()))
    client.close()
    client.close()


def test_a_closed_websocket_fails_what_is_under_way(tiny_server: Any) -> None:
    client = WebSocketClient(Address.of(tiny_server.url, "/v1/ws"), {}, PATIENCE_S)
    notes = Notes()
    problems: list[str] = []

    def ask() -> None:
        try:
            client.ask(body(max_tokens=20_000), answer)
        except StreamFailed as error:
            problems.append(str(error))

    answer = Answer(0.0, notes)
    begun = threading.Event()
    notes.first_token = lambda milliseconds: begun.set()  # type: ignore[method-assign]
    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(PATIENCE_S)
    client.close()
    thread.join(PATIENCE_S)
    assert len(problems) == 1
    assert not client.is_open
    with pytest.raises(StreamFailed):
        client.ask(body(), Answer(0.0, Notes()))


@contextmanager
def misbehaving(*answers: str) -> Iterator[Address]:
    """Gives one answer a connection, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(PATIENCE_S)
                    connection.recv(65536)
                    connection.sendall(answer.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        yield Address.of(f"http://127.0.0.1:{listener.getsockname()[1]}", "/v1/x")
        thread.join(PATIENCE_S)


def event(chunk: Any) -> str:
    return f"data: {orjson.dumps(chunk).decode()}\n\n"


def stream(events: str) -> str:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(events)}\r\n\r\n{events}"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (stream(event(delta("a"))), "broke off before"),
        (stream("data: [DONE]\n\n"), "no text came"),
        (stream('data: {"choices": [{"text": "a"}]}\n\n'), "an event that is no chunk: 'delta'"),
        (stream(event({"error": {"message": "It died."}})), "the stream says: It died."),
        ("HTTP/1.1 503 No\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy", "HTTP 503: busy"),
        ("nonsense\r\n\r\n", "HTTP"),
        ("", "closed the connection"),
    ],
)
def test_sse_says_what_is_wrong(answer: str, problem: str) -> None:
    with misbehaving(answer) as address:
        client = SseClient(address, {}, PATIENCE_S)
        with pytest.raises(StreamFailed, match=problem):
            client.ask(b"{}", Answer(0.0, Notes()))
        client.close()


def test_a_refusal_says_when_to_come_again() -> None:
    head = "HTTP/1.1 429 No\r\nContent-Length: 0\r\nRetry-After: "
    with misbehaving(f"{head}7\r\n\r\n", f"{head}Mon, 30 Nov 2026 05:03:47 GMT\r\n\r\n") as address:
        for expected in (7.0, None):
            client = SseClient(address, {}, PATIENCE_S)
            with pytest.raises(StreamFailed, match="HTTP 429") as caught:
                client.ask(b"{}", Answer(0.0, Notes()))
            assert caught.value.retry_after_s == expected
            client.close()


def test_a_silent_server_is_asked_once() -> None:
    whole = stream(event(delta("a")) + "data: [DONE]\n\n").encode()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = SseClient(Address.of(url, "/v1/x"), {}, 0.3)
        thread = threading.Thread(target=client.ask, args=(b"{}", Answer(0.0, Notes())))
        thread.start()
        connection, _ = listener.accept()
        with connection:
            connection.sendall(whole)
            thread.join(PATIENCE_S)
            with pytest.raises(StreamFailed, match="timed out"):
                client.ask(b"{}", Answer(0.0, Notes()))
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    whole = event(delta("a")) + "data: [DONE]\n\n"
    with misbehaving(stream(whole), stream(whole)) as address:
        client = SseClient(address, {}, PATIENCE_S)
        for _ in range(2):
            client.ask(b"{}", Answer(0.0, Notes()))
        client.close()


@pytest.mark.parametrize(
    "answer",
    ["HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""],
)
def test_a_refused_websocket_says_so(answer: str) -> None:
    with misbehaving(answer) as address, pytest.raises(StreamFailed, match="no WebSocket"):
        WebSocketClient(address, {}, PATIENCE_S)


@pytest.mark.parametrize(
    "make",
    [
        lambda address: SseClient(address, {}, 1.0).ask(b"{}", Answer(0.0, Notes())),
        lambda address: WebSocketClient(address, {}, 1.0),
    ],
)
def test_nobody_listens(make: Callable[[Address], Any]) -> None:
    with pytest.raises(StreamFailed, match="refused"):
        make(Address.of("http://127.0.0.1:1", "/"))
