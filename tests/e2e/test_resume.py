"""Streams that outlive their connections, through the public door of servers with one and two frontends."""

from __future__ import annotations

import itertools
import uuid

import httpx
import pytest
from resuming import Refusal, create, is_over, objects_of, resume, take
from server import running_server, wait_idle, wait_until
from ways_in import CHAT, COMPLETION, RESPONSE, SSE, ask, prompt, tell

PATIENCE_S = 300.0
# Comes first where another frontend has the stream, and takes a moment.
PING = ": ping\n\n"
ENDPOINTS = (CHAT, COMPLETION, RESPONSE)
SEEDED = {"model": "tiny", "max_tokens": 120, "ignore_eos": True, "seed": 11, "temperature": 0.9}
LONG = {**SEEDED, "max_tokens": 20_000}
# After so many events each: the connection is cut, and another one made.
CUTS = [(1,), (0, 1, 0, 2), (7, 30), (1, 1, 1, 1, 1, 1), (3, 0, 50)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one frontend", "two frontends"])
def server(tiny_model, request):
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=4000",
        "--max-num-seqs=16",
        f"--api-workers={request.param}",
        "--api-key=alice:sk-alice,bob:sk-bob",
        "--admin-key=root:sk-root",
        env={"OMP_NUM_THREADS": "1"},
    ) as running:
        yield running


ALICE = {"authorization": "Bearer sk-alice"}


@pytest.fixture(autouse=True)
def _as_alice(monkeypatch):
    """Whatever is asked through httpx brings alice's key, unless it brings another."""
    send = httpx.Client.send

    def send_with_key(self, request, **options):
        request.headers.setdefault("authorization", ALICE["authorization"])
        return send(self, request, **options)

    monkeypatch.setattr(httpx.Client, "send", send_with_key)


def fresh():
    return uuid.uuid4().hex


def said(heard):
    return [(s.text, s.reason, s.stop_reason, s.tokens, s.logprobs) for _, s in sorted(heard.choices.items())]


def interrupted(server, endpoint, body, cuts, transports, name=None):
    """All events of a stream whose connection is cut after so many each; transports in turn."""
    name = name or fresh()
    ways = itertools.cycle(transports)
    body = {**body, **prompt(endpoint, "Once upon a time")}
    events = take(create(server.url, endpoint, body, name, over=next(ways), key="sk-alice"), cuts[0])
    for count in [*cuts[1:], None]:
        if is_over(endpoint, events):
            break
        after = events[-1].number if events else 0
        events += take(resume(server.url, endpoint, name, after, over=next(ways), key="sk-alice"), count)
    return events


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("transports", [["sse"], ["socket"], ["sse", "socket"]], ids="-".join)
def test_whatever_is_cut_nothing_is_lost_and_nothing_doubled(server, endpoint, transports, cuts):
    events = interrupted(server, endpoint, SEEDED, cuts, transports)
    heard = tell(endpoint, objects_of(endpoint, events), SEEDED)
    plain = ask(server.url, endpoint, SSE, {**SEEDED, **prompt(endpoint, "Once upon a time")})
    assert said(heard) == said(plain)


FORMS = {
    "two choices": (COMPLETION, {"n": 2}),
    "log probabilities": (CHAT, {"logprobs": True, "top_logprobs": 3}),
    "usage": (CHAT, {"stream_options": {"include_usage": True}}),
    "a stop string": (COMPLETION, {"stop": ["e", "ab"]}),
    "echo": (COMPLETION, {"echo": True, "logprobs": 2}),
    "ids": (COMPLETION, {"return_token_ids": True}),
    "several prompts": (COMPLETION, {"prompt": ["One", "Two", "Three"]}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_stream_can_be_cut(server, form):
    endpoint, more = FORMS[form]
    body = {**SEEDED, "max_tokens": 60, **prompt(endpoint, "Once upon a time"), **more}
    whole = {**prompt(endpoint, "Once upon a time"), **more}
    events = interrupted_as(server, endpoint, body, whole)
    heard = tell(endpoint, objects_of(endpoint, events), body)
    plain = ask(server.url, endpoint, SSE, body)
    assert said(heard) == said(plain)
    assert heard.usage == plain.usage or heard.usage is None


def interrupted_as(server, endpoint, body, more):
    name = fresh()
    events = take(create(server.url, endpoint, {**body, **more}, name, key="sk-alice"), 2)
    for count in (1, 0, 3, None):
        if not is_over(endpoint, events):
            after = events[-1].number
            events += take(resume(server.url, endpoint, name, after, key="sk-alice"), count)
    return events


def test_a_stream_that_has_ended_is_told_again(server):
    name = fresh()
    body = {**SEEDED, **prompt(CHAT, "hello")}
    events = take(create(server.url, CHAT, body, name, key="sk-alice"))
    for _ in range(4):
        assert take(resume(server.url, CHAT, name, 0, key="sk-alice")) == events
        assert take(resume(server.url, CHAT, name, 5, key="sk-alice")) == events[5:]
    # Who has had the end gets an end, and nothing twice.
    for after in (len(events) - 1, len(events)):
        assert take(resume(server.url, CHAT, name, after, key="sk-alice")) == events[after:]
        (last,) = take(resume(server.url, CHAT, name, after, over="socket", key="sk-alice"))
        assert last == events[-1]


def test_the_newest_connection_has_the_stream(server):
    name = fresh()
    old = create(server.url, COMPLETION, {**LONG, **prompt(COMPLETION, "hello")}, name, key="sk-alice")
    beginning = iter(old)
    first = next(beginning)
    news = [resume(server.url, COMPLETION, name, 0, key="sk-alice") for _ in range(4)]
    # Those before are cut off in the midst of the stream.
    with pytest.raises(httpx.RemoteProtocolError):
        list(beginning)
    for lost in news[:-1]:
        with pytest.raises(httpx.RemoteProtocolError):
            list(lost)
    newest = iter(news[-1])
    assert next(newest) == first
    socket = resume(server.url, COMPLETION, name, 0, over="socket", key="sk-alice")
    with pytest.raises(httpx.RemoteProtocolError):
        list(newest)
    last = resume(server.url, COMPLETION, name, 0, key="sk-alice")
    with pytest.raises(Refusal) as taken:
        list(socket)
    assert (taken.value.status, taken.value.code) == (409, "stream_taken")
    last.close()
    end(server, name)


def end(server, name, endpoint_prefix="cmpl-"):
    httpx.delete(f"{server.url}/v1/streams/{endpoint_prefix}{name}", timeout=PATIENCE_S).raise_for_status()
    wait_idle(server)


@pytest.mark.parametrize("over", ["sse", "socket"])
def test_a_stream_is_its_callers_own(server, over):
    name = fresh()
    take(create(server.url, COMPLETION, {**LONG, **prompt(COMPLETION, "hello")}, name, key="sk-alice"), 3)
    unknown = []
    for key, wanted in (("sk-bob", name), ("sk-alice", fresh())):
        for _ in range(4):
            with pytest.raises(Refusal) as refused:
                resume(server.url, COMPLETION, wanted, 0, over=over, key=key)
            assert (refused.value.status, refused.value.code) == (404, "stream_not_found")
            unknown.append(refused.value.error["message"].replace(wanted, "ID"))
    assert len(set(unknown)) == 1
    # Two callers may choose one id.
    mine = create(
        server.url, COMPLETION, {**SEEDED, **prompt(COMPLETION, "I")}, name, key="sk-bob", over=over
    )
    assert is_over(COMPLETION, take(mine))
    for key in ("sk-root", "sk-alice"):
        assert len(take(resume(server.url, COMPLETION, name, 3, over=over, key=key), 2)) == 2
    end(server, name)


def test_a_request_that_comes_twice_runs_once(server):
    name, body = fresh(), {**LONG, **prompt(COMPLETION, "hello")}
    first = create(server.url, COMPLETION, body, name, key="sk-alice")
    events = take(first, 2)
    for over in ("sse", "socket") * 4:
        with pytest.raises(Refusal) as refused:
            take(create(server.url, COMPLETION, body, name, over=over, key="sk-alice"))
        assert (refused.value.status, refused.value.code) == (409, "stream_exists")
    assert take(resume(server.url, COMPLETION, name, 0, key="sk-alice"), 2) == events
    # Who does not ask for it may use an id as often as before.
    assert ask(server.url, COMPLETION, SSE, {**SEEDED, **prompt(COMPLETION, "x"), "request_id": name})
    end(server, name)


@pytest.mark.parametrize(
    ("last", "status", "code"),
    [
        ("cmpl-another:1", 400, "invalid_request"),
        ("1", 400, "invalid_request"),
        ("{stream}", 400, "invalid_request"),
        ("{stream}:", 400, "invalid_request"),
        ("{stream}:x", 400, "invalid_request"),
        ("{stream}:-1", 400, "invalid_request"),
        ("{stream}:1.0", 400, "invalid_request"),
        ("{stream}:\xb2", 400, "invalid_request"),
        ("{stream}:" + "9" * 30, 400, "invalid_request"),
        ("{stream}:" + "9" * 5000, 400, "invalid_request"),
        ("{stream}:999999999", 400, "invalid_request"),
    ],
)
def test_a_last_event_that_is_none_is_refused(server, last, status, code):
    name = fresh()
    events = take(create(server.url, COMPLETION, {**SEEDED, **prompt(COMPLETION, "a")}, name, key="sk-alice"))
    stream = f"cmpl-{name}"
    for _ in range(4):
        headers = {"last-event-id": last.format(stream=stream).encode("latin-1")}
        answer = httpx.get(f"{server.url}/v1/streams/{stream}", headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == code
        assert len(answer.content) < 500
    path = f"{server.url}/v1/streams/{stream}?after=3"
    answer = httpx.get(path, headers={"accept": "text/event-stream"}, timeout=PATIENCE_S)
    text = answer.text.removeprefix(PING)
    assert text.startswith(f"id: {stream}:4\n")
    assert text.count("\n\n") == len(events) - 3
    # A browser that comes back by itself asks for the same URL, and says what it has.
    headers = {"accept": "text/event-stream", "last-event-id": f"{stream}:5"}
    answer = httpx.get(path, headers=headers, timeout=PATIENCE_S)
    assert answer.text.removeprefix(PING).startswith(f"id: {stream}:6\n")
    # Without either header it is a question about what runs, of which this is no part any more.
    assert httpx.get(path, timeout=PATIENCE_S).status_code == 404


def test_a_stream_shows_as_detached_and_can_be_ended(server):
    name, body = fresh(), {**LONG, **prompt(COMPLETION, "hello")}
    path = f"{server.url}/v1/streams/cmpl-{name}"
    connection = create(server.url, COMPLETION, body, name, key="sk-alice")
    beginning = iter(connection)
    events = [next(beginning)]
    assert httpx.get(path, timeout=PATIENCE_S).json()["status"] == "running"
    connection.close()
    wait_until(lambda: httpx.get(path, timeout=PATIENCE_S).json()["status"] == "detached", "it is detached")
    (listed,) = httpx.get(f"{server.url}/v1/streams", timeout=PATIENCE_S).json()["data"]
    assert (listed["id"], listed["status"]) == (f"cmpl-{name}", "detached")
    count = listed["completion_tokens"]
    wait_until(lambda: httpx.get(path, timeout=PATIENCE_S).json()["completion_tokens"] > count, "it goes on")
    end(server, name)
    events += take(resume(server.url, COMPLETION, name, 1, key="sk-alice"))
    (choice,) = tell(COMPLETION, objects_of(COMPLETION, events), body).choices.values()
    assert choice.reason == "abort"


@pytest.mark.parametrize("way", [("sse", "socket"), ("socket", "socket")], ids="-".join)
def test_who_came_back_over_a_socket_can_cancel(server, way):
    for _ in range(3):
        name, body = fresh(), {**LONG, **prompt(COMPLETION, "hello")}
        events = take(create(server.url, COMPLETION, body, name, over=way[0], key="sk-alice"), 1)
        socket = resume(server.url, COMPLETION, name, 1, over=way[1], key="sk-alice")
        socket.cancel()
        events += take(socket)
        (choice,) = tell(COMPLETION, objects_of(COMPLETION, events), body).choices.values()
        assert choice.reason == "abort"
    wait_idle(server)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_nothing_changes_for_who_does_not_ask(server, endpoint):
    body = {**SEEDED, **prompt(endpoint, "hello"), "stream": True}
    if endpoint == RESPONSE:
        body["max_output_tokens"] = body.pop("max_tokens")
    paths = {CHAT: "/v1/chat/completions", COMPLETION: "/v1/completions", RESPONSE: "/v1/responses"}
    for headers in ({}, {"x-stream-resume": "0"}):
        answer = httpx.post(server.url + paths[endpoint], json=body, headers=headers, timeout=PATIENCE_S)
        assert "x-stream-id" not in answer.headers
        assert "\nid:" not in answer.text
    # Nor for an answer in one piece.
    whole = httpx.post(
        server.url + paths[endpoint],
        json={**body, "stream": False},
        headers={"x-stream-resume": "1"},
        timeout=PATIENCE_S,
    )
    assert whole.status_code == 200
    assert "x-stream-id" not in whole.headers


def test_an_error_before_the_beginning_is_an_ordinary_answer(server):
    name = fresh()
    for _ in range(2):
        with pytest.raises(Refusal) as refused:
            create(server.url, COMPLETION, {**SEEDED, "prompt": "x" * 400_000}, name, key="sk-alice")
        assert refused.value.status == 400
    assert take(create(server.url, COMPLETION, {**SEEDED, "prompt": "x"}, name, key="sk-alice"))
