"""A client that loses its connections on purpose and comes back, over SSE and WebSockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx
from ways_in import PATHS, RESPONSE, strict_json
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

PATIENCE_S = 300.0
PREFIXES = {"chat.completions": "chatcmpl-", "completions": "cmpl-", "responses": "resp_"}


class Event(NamedTuple):
    """One event: its number and what it says; `[DONE]` and `done` are None."""

    number: int
    data: Any


class Refusal(Exception):
    """The server does not give the stream.

    Attributes:
        status, code: of the error.
    """

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status}: {error}")
        self.status, self.code, self.error = status, error["code"], error


class Events:
    """Numbered events of one connection, over SSE.

    Args:
        response: the head has come.
    """

    def __init__(self, response: httpx.Response, stack: ExitStack, endpoint: str) -> None:
        self.response = response
        self._stack = stack
        self._endpoint = endpoint
        if response.status_code != 200:
            refusal = Refusal(response.status_code, strict_json(response.read())["error"])
            stack.close()
            raise refusal
        self.stream = response.headers["x-stream-id"]

    def __iter__(self) -> Iterator[Event]:
        fields: dict[str, str] = {}
        for line in self.response.iter_lines():
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                assert name not in fields, "two lines of one name in an event"
                fields[name] = value
                continue
            if not fields:
                continue
            stream, _, number = fields["id"].rpartition(":")
            assert stream == self.stream
            data = None if fields["data"] == "[DONE]" else strict_json(fields["data"])
            if self._endpoint == RESPONSE:
                assert fields["event"] == data["type"]
            else:
                assert "event" not in fields
            fields = {}
            yield Event(int(number), data)

    def close(self) -> None:
        """Drops the connection."""
        self._stack.close()


class Messages:
    """Numbered messages of one stream on a WebSocket of its own.

    Args:
        url: of the server.
        message: the first.
    """

    def __init__(self, url: str, message: dict[str, Any], headers: dict[str, str]) -> None:
        address = url.replace("http", "ws", 1) + "/v1/ws"
        self._stack = ExitStack()
        self._socket = self._stack.enter_context(
            connect(
                address, max_size=None, open_timeout=PATIENCE_S, additional_headers=headers, compression=None
            )
        )
        self._socket.send(json.dumps({"id": "only", **message}))
        self.stream = message.get("stream")
        self._first: Any = None
        if message["type"] == "create":
            accepted = self._next()
            self.stream = accepted["stream"]
            assert accepted == {"id": "only", "type": "accepted", "stream": self.stream}
        # As with a head of HTTP: an error shows at once.
        self._first = self._next()

    def _next(self) -> dict[str, Any]:
        message = strict_json(self._socket.recv(PATIENCE_S))
        assert message["id"] == "only"
        if message["type"] == "error" and "n" not in message:
            self.close()
            raise Refusal(message["error"]["status"], message["error"])
        return message

    def __iter__(self) -> Iterator[Event]:
        message = self._first
        while True:
            if message["type"] == "done":
                assert message.keys() == {"id", "type", "n"}
                yield Event(message["n"], None)
                return
            if message["type"] == "error":
                yield Event(message["n"], {"error": message["error"]})
                return
            assert message.keys() == {"id", "type", "n", "chunk"}
            yield Event(message["n"], message["chunk"])
            try:
                message = self._next()
            except ConnectionClosed:
                return

    def cancel(self) -> None:
        """Asks for the end."""
        self._socket.send(json.dumps({"type": "cancel", "id": "only"}))

    def close(self) -> None:
        """Drops the connection."""
        self._stack.close()


def create(
    url: str, endpoint: str, body: dict[str, Any], name: str, *, over: str = "sse", key: str | None = None
) -> Events | Messages:
    """Asks for a resumable stream of that name."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = _as_of(endpoint, body)
    if over == "socket":
        options = {**body.pop("stream_options", {}), "resumable": True}
        body |= {"stream_options": options, "request_id": name}
        return Messages(url, {"type": "create", "endpoint": endpoint, "body": body}, headers)
    headers |= {"x-stream-resume": "1", "x-request-id": name}
    return _open("POST", url + PATHS[endpoint], endpoint, headers, body)


def resume(
    url: str, endpoint: str, name: str, after: int, *, over: str = "sse", key: str | None = None
) -> Events | Messages:
    """Comes back to it, with all events up to number `after`."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    stream = PREFIXES[endpoint] + name
    if over == "socket":
        return Messages(url, {"type": "resume", "stream": stream, "after": after}, headers)
    headers |= {"accept": "text/event-stream"}
    if after:
        headers |= {"last-event-id": f"{stream}:{after}"}
    return _open("GET", f"{url}/v1/streams/{stream}", endpoint, headers)


def take(connection: Events | Messages, count: int | None = None) -> list[Event]:
    """The next `count` events, or all that follow; the connection is dropped then."""
    events: list[Event] = []
    if count != 0:
        for event in connection:
            events.append(event)
            if len(events) == count:
                break
    connection.close()
    return events


def is_over(endpoint: str, events: list[Event]) -> bool:
    """Whether these are all events of a stream."""
    if not events:
        return False
    last = events[-1].data
    if last is None:
        return True
    if endpoint == RESPONSE:
        return last.get("type") in ("response.completed", "response.incomplete", "response.failed")
    return "error" in last


def objects_of(endpoint: str, events: list[Event]) -> list[dict[str, Any]]:
    """The objects in all events of a stream, which must be numbered without a gap."""
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert is_over(endpoint, events)
    return [event.data for event in events if event.data is not None]


def _as_of(endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    body = {**body, "stream": True}
    if endpoint == RESPONSE and "max_tokens" in body:
        body["max_output_tokens"] = body.pop("max_tokens")
    return body


def _open(
    method: str, url: str, endpoint: str, headers: dict[str, str], body: dict[str, Any] | None = None
) -> Events:
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=PATIENCE_S))
        response = stack.enter_context(client.stream(method, url, json=body, headers=headers))
        return Events(response, stack.pop_all(), endpoint)
