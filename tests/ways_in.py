"""One request over every endpoint and every transport, read strictly, told in one form.

Whoever reads a stream here checks all that holds for any stream: so each test that asks over the `WAYS`
checks it too.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import raw_http
from websockets.sync.client import connect

PATIENCE_S = 300.0
CHAT, COMPLETION, RESPONSE = "chat.completions", "completions", "responses"
PATHS = {CHAT: "/v1/chat/completions", COMPLETION: "/v1/completions", RESPONSE: "/v1/responses"}
HTTP, SSE, SOCKET, SOCKET_STREAM = "http", "sse", "socket", "socket-stream"
TRANSPORTS = (HTTP, SSE, SOCKET, SOCKET_STREAM)
WAYS = [(endpoint, transport) for endpoint in (CHAT, COMPLETION) for transport in TRANSPORTS]
ALL_WAYS = [*WAYS, *((RESPONSE, transport) for transport in TRANSPORTS)]


class Refused(Exception):
    """The server answered with an error.

    Attributes:
        status: of HTTP, or what a WebSocket says of it.
        error: the error object.
        is_late: it came after the beginning of a stream.
    """

    def __init__(self, status: int, error: dict[str, Any], is_late: bool = False) -> None:
        super().__init__(f"{status}: {error}")
        assert error["message"], error
        assert {"message", "type", "param", "code"} <= error.keys(), error
        self.status, self.error, self.is_late = status, error, is_late


@dataclass
class Said:
    """One choice."""

    text: str = ""
    reason: str | None = None
    stop_reason: Any = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)


@dataclass
class Heard:
    """An answer, whatever brought it."""

    id: str = ""
    choices: dict[int, Said] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of the only choice."""
        (choice,) = self.choices.values()
        return choice.text

    @property
    def only(self) -> Said:
        """The only choice."""
        (choice,) = self.choices.values()
        return choice

    def said(self, index: int) -> Said:
        """The choice with this index, which there is from now on."""
        return self.choices.setdefault(index, Said())


def strict_json(text: str | bytes) -> Any:
    """JSON without NaN and Infinity, as strict parsers have it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def prompt(endpoint: str, text: str) -> dict[str, Any]:
    """What each endpoint calls the prompt."""
    if endpoint == CHAT:
        return {"messages": [{"role": "user", "content": text}]}
    return {"prompt": text} if endpoint == COMPLETION else {"input": text}


def ask(url: str, endpoint: str, transport: str, body: dict[str, Any]) -> Heard:
    """The answer to `body`, to which `stream` is added where the transport wants it.

    Raises:
        Refused: it is an error.
    """
    body = dict(body)
    if endpoint == RESPONSE and "max_tokens" in body:
        body["max_output_tokens"] = body.pop("max_tokens")
    is_stream = transport in (SSE, SOCKET_STREAM)
    if is_stream:
        body["stream"] = True
    else:
        body.pop("stream_options", None)
    if transport == HTTP:
        return _whole(endpoint, _post(url, endpoint, body))
    if transport == SSE:
        events: Iterator[dict[str, Any]] = _sse(url, endpoint, body)
    else:
        events = _socket(url, endpoint, body)
    if not is_stream:
        (document,) = events
        return _whole(endpoint, document)
    if endpoint == RESPONSE:
        return _response_stream(list(events))
    wants_usage = bool(body.get("stream_options", {}).get("include_usage"))
    is_continuous = wants_usage and bool(body["stream_options"].get("continuous_usage_stats"))
    return _stream(endpoint, list(events), wants_usage, is_continuous)


def tell(endpoint: str, objects: list[dict[str, Any]], body: dict[str, Any]) -> Heard:
    """The answer to `body` of which these are all objects of a stream."""
    if endpoint == RESPONSE:
        return _response_stream(objects)
    options = body.get("stream_options", {})
    wants_usage = bool(options.get("include_usage"))
    return _stream(
        endpoint, objects, wants_usage, wants_usage and bool(options.get("continuous_usage_stats"))
    )


def pose(
    url: str, endpoint: str, transport: str, body: dict[str, Any], receive_buffer: int | None = None
) -> socket.socket:
    """A connection on which `body` has been asked for, and nothing is read yet."""
    body = {**body, "stream": transport in (SSE, SOCKET_STREAM)}
    if endpoint == RESPONSE and "max_tokens" in body:
        body["max_output_tokens"] = body.pop("max_tokens")
    connection = raw_http.dial(url, receive_buffer)
    if transport in (HTTP, SSE):
        connection.sendall(raw_http.request(PATHS[endpoint], body))
        return connection
    raw_http.open_socket(connection)
    connection.sendall(raw_http.frame({"type": "create", "id": "only", "endpoint": endpoint, "body": body}))
    return connection


def _post(url: str, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    # Not by httpx's `json`: it refuses numbers that a test wants to send.
    headers = {"content-type": "application/json"}
    answer = httpx.post(url + PATHS[endpoint], content=json.dumps(body), headers=headers, timeout=PATIENCE_S)
    document = strict_json(answer.content)
    if answer.status_code != 200:
        raise Refused(answer.status_code, document["error"])
    return document


def _sse(url: str, endpoint: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The data of each event, by a reader that knows only what the standard says of lines."""
    headers = {"content-type": "application/json", "accept-encoding": "gzip"}
    with (
        httpx.Client(timeout=PATIENCE_S) as client,
        client.stream("POST", url + PATHS[endpoint], content=json.dumps(body), headers=headers) as answer,
    ):
        if answer.status_code != 200:
            raise Refused(answer.status_code, strict_json(answer.read())["error"])
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        assert "no-cache" in answer.headers["cache-control"]
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        whole = b"".join(answer.iter_bytes()).decode()
    yield from sse_data(whole, ends_with_done=endpoint != RESPONSE)


def sse_data(whole: str, *, ends_with_done: bool) -> Iterator[dict[str, Any]]:
    """The objects of a whole stream.

    Raises:
        Refused: the last of them is an error.
    """
    # What str.splitlines takes for the end of a line, and a naive client with it, must be none.
    assert [line for line in whole.splitlines() if line] == [
        line for line in whole.replace("\r\n", "\n").split("\n") if line
    ]
    data = []
    for event in whole.replace("\r\n", "\n").removesuffix("\n\n").split("\n\n"):
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        for line in lines:
            name, _, value = line.partition(": ")
            assert name in ("data", "event", "id"), line
            if name == "data":
                data.append(value)
    if ends_with_done and data[-1] == "[DONE]":
        data.pop()
    elif ends_with_done:
        last = strict_json(data[-1])
        assert "error" in last, "neither [DONE] nor an error ends the stream"
        raise Refused(0, last["error"], is_late=True)
    assert "[DONE]" not in data
    yield from map(strict_json, data)


def _socket(url: str, endpoint: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with connect(url.replace("http", "ws", 1) + "/v1/ws", max_size=None, open_timeout=PATIENCE_S) as client:
        client.send(json.dumps({"type": "create", "id": "only", "endpoint": endpoint, "body": body}))
        num_heard = 0
        while True:
            message = strict_json(client.recv(PATIENCE_S))
            # What is no JSON was meant for no stream that anybody could name.
            assert message.get("id") == "only" or message["type"] == "error", message
            if message["type"] == "done":
                return
            if message["type"] == "error":
                error = message["error"]
                raise Refused(error["status"], error, is_late=num_heard > 0)
            num_heard += 1
            assert message["type"] == ("chunk" if body.get("stream") else "result"), message
            yield message[message["type"]]


def _whole(endpoint: str, document: dict[str, Any]) -> Heard:
    heard = Heard(document["id"], usage=document["usage"])
    if endpoint == RESPONSE:
        return _response(heard, document)
    assert document["object"] == ("chat.completion" if endpoint == CHAT else "text_completion")
    for choice in document["choices"]:
        said = heard.said(choice["index"])
        if endpoint == CHAT:
            assert choice["message"]["role"] == "assistant"
            said.text = choice["message"]["content"]
        else:
            said.text = choice["text"]
        said.reason, said.stop_reason = choice["finish_reason"], choice.get("stop_reason")
        _add_logprobs(said, choice.get("logprobs"))
    assert sorted(heard.choices) == list(range(len(document["choices"])))
    return heard


def _response(heard: Heard, document: dict[str, Any]) -> Heard:
    said = heard.said(0)
    said.text = "".join(part["text"] for item in document["output"] for part in item["content"])
    said.reason = {"completed": "stop", "incomplete": "length"}[document["status"]]
    usage = document["usage"]
    heard.usage = {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"]}
    return heard


def _response_stream(events: list[dict[str, Any]]) -> Heard:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    if events[-1]["type"] == "response.failed":
        problem = events[-2]
        assert problem["type"] == "error"
        assert all(problem[name] == problem["error"][name] for name in ("code", "message", "param"))
        assert events[-1]["response"]["error"]["message"] == problem["message"]
        raise Refused(0, problem["error"], is_late=True)
    document = events[-1]["response"]
    heard = _response(Heard(document["id"], chunks=events), document)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "" not in deltas
    assert "".join(deltas) == heard.text
    return heard


def _stream(endpoint: str, chunks: list[dict[str, Any]], wants_usage: bool, is_continuous: bool) -> Heard:
    heard = Heard(chunks[0]["id"], chunks=chunks)
    if wants_usage:
        last = chunks[-1]
        assert last["choices"] == []
        heard.usage = last["usage"]
        assert heard.usage is not None
    kind = "chat.completion.chunk" if endpoint == CHAT else "text_completion"
    for number, chunk in enumerate(chunks):
        assert (chunk["id"], chunk["object"]) == (heard.id, kind)
        if not wants_usage:
            assert chunk.get("usage") is None
        elif number < len(chunks) - 1:
            assert (chunk["usage"] is not None) == is_continuous
        indexes = [choice["index"] for choice in chunk["choices"]]
        assert len(indexes) == len(set(indexes)), "two deltas of one choice in a chunk"
        assert indexes or (wants_usage and number == len(chunks) - 1)
        for choice in chunk["choices"]:
            _add_delta(endpoint, heard, choice)
    assert sorted(heard.choices) == list(range(len(heard.choices)))
    assert all(said.reason for said in heard.choices.values()), "a choice without a finish reason"
    return heard


def _add_delta(endpoint: str, heard: Heard, choice: dict[str, Any]) -> None:
    index = choice["index"]
    is_first = index not in heard.choices
    said = heard.said(index)
    assert said.reason is None, "something comes after the finish reason"
    if endpoint == CHAT:
        delta = choice["delta"]
        assert None not in delta.values(), "members that are absent are left out"
        assert delta.get("role") == ("assistant" if is_first else None)
        if is_first:
            assert delta["content"] == ""
        text = delta.get("content", "")
        assert text or is_first or choice["finish_reason"] or choice["logprobs"], "an empty delta"
    else:
        text = choice["text"]
        assert text or choice["finish_reason"] or choice["logprobs"] or "prompt_token_ids" in choice
    if choice["finish_reason"] is not None:
        assert text == "", "some clients look at no text beside a finish reason"
    said.text += text
    said.reason, said.stop_reason = choice["finish_reason"], choice.get("stop_reason")
    _add_logprobs(said, choice.get("logprobs"))


def _add_logprobs(said: Said, logprobs: dict[str, Any] | None) -> None:
    if logprobs is None:
        return
    if "content" in logprobs:
        for entry in logprobs["content"]:
            said.tokens.append(entry["token"])
            said.logprobs.append(entry["logprob"])
            said.top.append(entry["top_logprobs"])
        return
    counts = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "text_offset")}
    assert len(counts) == 1, logprobs
    said.tokens += logprobs["tokens"]
    said.logprobs += logprobs["token_logprobs"]
    said.offsets += logprobs["text_offset"]
    said.top += logprobs["top_logprobs"] or []
