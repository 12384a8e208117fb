"""What a client sends wrongly is answered 4xx by name, and nobody else notices."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from server import sse_events

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def http(tiny_server):
    with httpx.Client(base_url=tiny_server.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def canary(tiny_server):
    """A stream that runs through the whole module and must neither end early nor show an error."""
    stop = threading.Event()
    problems: list[str] = []
    events = 0

    def run() -> None:
        nonlocal events
        body = {"model": "tiny", "prompt": "canary", "max_tokens": 500, "ignore_eos": True, "stream": True}
        while not stop.is_set():
            with (
                httpx.Client(base_url=tiny_server.url, timeout=300) as client,
                client.stream("POST", COMPLETIONS, json=body) as response,
            ):
                got = list(sse_events(response))
                events += len(got)
                if got[-1] != "[DONE]" or any('"error"' in event for event in got):
                    problems.append(got[-2])

    thread = threading.Thread(target=run)
    thread.start()
    yield
    stop.set()
    thread.join(300)
    assert problems == []
    assert events > 0


BAD = [
    (CHAT, {"model": "nope", "messages": USER}, 404, "model"),
    (CHAT, {"model": "tiny"}, 400, "messages"),
    (CHAT, {"model": "tiny", "messages": []}, 400, "messages"),
    (CHAT, {"model": "tiny", "messages": "hi"}, 400, "messages"),
    (CHAT, {"model": "tiny", "messages": USER, "max_tokens": "5"}, 400, "max_tokens"),
    (CHAT, {"model": "tiny", "messages": USER, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"model": "tiny", "messages": USER, "max_tokens": -1}, 400, "max_tokens"),
    (CHAT, {"model": "tiny", "messages": USER, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"model": "tiny", "messages": USER, "temperature": -0.1}, 400, "temperature"),
    (CHAT, {"model": "tiny", "messages": USER, "temperature": 2.5}, 400, "temperature"),
    (CHAT, {"model": "tiny", "messages": USER, "top_p": 0}, 400, "top_p"),
    (CHAT, {"model": "tiny", "messages": USER, "top_p": 1.5}, 400, "top_p"),
    (CHAT, {"model": "tiny", "messages": USER, "top_k": -5}, 400, "top_k"),
    (CHAT, {"model": "tiny", "messages": USER, "top_k": 0.01}, 400, "top_k"),
    (CHAT, {"model": "tiny", "messages": USER, "min_p": 2}, 400, "min_p"),
    (CHAT, {"model": "tiny", "messages": USER, "seed": 2**63}, 400, "seed"),
    (CHAT, {"model": "tiny", "messages": USER, "seed": 1.5}, 400, "seed"),
    (CHAT, {"model": "tiny", "messages": USER, "stream": "true"}, 400, "stream"),
    (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "x " * 200_000}]}, 400, "messages"),
    (COMPLETIONS, {"model": "tiny"}, 400, "prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": [1, 2, 999_999]}, 400, "prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": [2**62]}, 400, "prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": [1.5]}, 400, "prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": [True]}, 400, "prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": [1] * 70_000}, 400, "prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": "x", "logit_bias": {"cat": 1}}, 400, "logit_bias"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_refused_by_name(http, canary, path, body, status, param, stream):
    answer = http.post(path, json={"stream": stream, **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"{:",
        b"",
        b"[]",
        b"null",
        b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe\xc4\xe3"}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"x":'
        + b"[" * 10000
        + b"]" * 10000
        + b"}",
        b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"temperature":NaN}',
    ],
)
def test_malformed_json(http, canary, raw):
    answer = http.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_lone_surrogate_is_no_server_error(http, canary):
    raw = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}).encode()
    assert http.post(CHAT, content=raw, headers={"content-type": "application/json"}).status_code in (
        200,
        400,
    )


def test_a_body_over_the_limit(http, canary):
    body = {"model": "tiny", "prompt": "x" * 3 * 2**20}
    assert http.post(COMPLETIONS, json=body).status_code == 413


def test_a_chunked_body_over_the_limit(http, canary):
    def parts():
        yield b'{"model":"tiny","prompt":"'
        for _ in range(300):
            yield b"x" * 10_000
        yield b'"}'

    answer = http.post(COMPLETIONS, content=parts(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-45])
def test_tiny_temperatures_are_greedy(http, canary, temperature):
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 8}
    greedy = http.post(COMPLETIONS, json={**body, "temperature": 0}).json()
    assert (
        http.post(COMPLETIONS, json={**body, "temperature": temperature}).json()["choices"][0]["text"]
        == (greedy["choices"][0]["text"])
    )


def test_unknown_paths_and_methods_are_answered_in_the_same_shape(http, canary):
    assert http.get("/v1/nothing").json()["error"]["message"]
    assert http.get("/v1/nothing").status_code == 404
    assert http.get(CHAT).status_code == 405
