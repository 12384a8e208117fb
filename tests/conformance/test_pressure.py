"""More than there is room for, clients that do not read, and what is left of those who went."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server import load, wait_idle, wait_until
from ways_in import (
    ALL_WAYS,
    CHAT,
    COMPLETION,
    HTTP,
    PATHS,
    SOCKET_STREAM,
    SSE,
    TRANSPORTS,
    WAYS,
    ask,
    pose,
    prompt,
)

STREAM_WAYS = [way for way in ALL_WAYS if way[1] in (SSE, SOCKET_STREAM)]
MODEL = {"model": "tiny"}


@pytest.fixture(autouse=True)
def _idle_after(cramped_server):
    engine = cramped_server.engine.pid
    yield
    wait_idle(cramped_server)
    assert cramped_server.engine.pid == engine
    assert "Traceback" not in cramped_server.output


def number_of(text, name, **labels):
    """The sum of a metric's samples that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def metrics(server):
    return httpx.get(f"{server.url}/metrics", timeout=300).raise_for_status().text


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
def test_more_than_the_kv_cache_holds_is_said_all_the_same(cramped_server, endpoint, transport):
    bodies = [
        {
            **MODEL,
            **prompt(endpoint, f"Number {number} of many"),
            "max_tokens": 200,
            "ignore_eos": True,
            "temperature": 0,
        }
        for number in range(12)
    ]
    before = load(cramped_server)["preemptions"]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: ask(cramped_server.url, endpoint, transport, body), bodies))
    assert load(cramped_server)["preemptions"] > before, "there was room enough"
    for body, heard in list(zip(bodies, together, strict=True))[:4]:
        assert heard.text == ask(cramped_server.url, endpoint, HTTP, body).text
        assert heard.only.reason == "length"


@pytest.mark.parametrize(("endpoint", "transport"), WAYS)
def test_somebody_more_important_among_many_choices(cramped_server, endpoint, transport):
    body = {**MODEL, **prompt(endpoint, "Go on"), "ignore_eos": True, "temperature": 0, "n": 4}
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        many = [
            pool.submit(
                ask, cramped_server.url, endpoint, transport, {**body, "max_tokens": 150, "priority": 0}
            )
            for _ in range(4)
        ]
        urgent = pool.submit(
            ask, cramped_server.url, endpoint, transport, {**body, "max_tokens": 20, "priority": -10}
        )
        assert len(urgent.result(300).choices) == 4
        for waiting in many:
            assert {said.reason for said in waiting.result(300).choices.values()} == {"length"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_overload_is_turned_away_and_told_when_to_come_back(cramped_server, stream):
    body = {**MODEL, "prompt": "Go on", "max_tokens": 40, "ignore_eos": True, "stream": stream}
    statuses = Counter()

    def request(client):
        answer = client.post(PATHS[COMPLETION], json=body)
        statuses[answer.status_code] += 1
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "overloaded"
        else:
            assert answer.status_code == 200
        return answer.status_code

    limits = httpx.Limits(max_connections=200)
    with (
        httpx.Client(base_url=cramped_server.url, timeout=300, limits=limits) as client,
        concurrent.futures.ThreadPoolExecutor(200) as pool,
    ):
        futures = [pool.submit(request, client) for _ in range(400)]
        assert httpx.get(f"{cramped_server.url}/health", timeout=300).status_code == 200
        for future in futures:
            future.result(300)
    assert statuses[200] >= 64
    assert statuses[429] > 0, "nothing was too much"


def num_established(server):
    """Connections that the server holds open."""
    return sum(each.status == "ESTABLISHED" for each in server.frontend.net_connections("tcp"))


def test_clients_that_do_not_read_are_dropped_and_cost_nobody_anything(cramped_server):
    body = {**MODEL, **prompt(CHAT, "Go on"), "ignore_eos": True, "stream": True}
    # More than the system's buffers take.
    greedy = {**body, "max_tokens": 480, "n": 8, "logprobs": True, "top_logprobs": 20}
    num_connections = num_established(cramped_server)
    memory = cramped_server.frontend.memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(pose(cramped_server.url, CHAT, SSE, greedy, 4096))
        wait_until(lambda: load(cramped_server)["running"] > 0, "they run")
        for _ in range(3):
            heard = ask(cramped_server.url, CHAT, SSE, {**body, "max_tokens": 20, "priority": -1})
            assert heard.only.reason == "length"
        wait_idle(cramped_server)
        # Their answers may be whole by then, but nobody took them.
        wait_until(lambda: num_established(cramped_server) <= num_connections, "they are dropped")
        assert cramped_server.frontend.memory_info().rss < memory + 60 * 2**20


@pytest.mark.parametrize(("endpoint", "transport"), STREAM_WAYS)
def test_dropped_streams_are_counted_as_that(cramped_server, endpoint, transport):
    before = metrics(cramped_server)
    body = {**MODEL, **prompt(endpoint, "Go on"), "max_tokens": 400, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            connection = stack.enter_context(pose(cramped_server.url, endpoint, transport, body))
            assert connection.recv(64)
    wait_idle(cramped_server)

    def count(text, **labels):
        return number_of(text, "vllm:request_success_total", **labels)

    wait_until(
        lambda: (
            count(metrics(cramped_server), finished_reason="abort")
            == count(before, finished_reason="abort") + 5
        ),
        "five more are counted as aborted",
    )
    after = metrics(cramped_server)
    requests = count(after) - count(before)
    lengths = "vllm:request_generation_tokens"
    assert requests == number_of(after, f"{lengths}_count") - number_of(before, f"{lengths}_count")
    tokens = number_of(after, f"{lengths}_sum") - number_of(before, f"{lengths}_sum")
    total = "vllm:generation_tokens_total"
    # The engine may have said more than reached the five.
    assert number_of(after, total) - number_of(before, total) >= tokens > 0
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert number_of(after, f"vllm:{gauge}") == 0


@pytest.mark.parametrize(("endpoint", "transport"), STREAM_WAYS)
def test_an_id_whose_stream_was_dropped_can_be_used_again(cramped_server, endpoint, transport):
    body = {**MODEL, **prompt(endpoint, "Go on"), "ignore_eos": True, "temperature": 0, "request_id": "mine"}
    expected = ask(cramped_server.url, endpoint, HTTP, {**body, "max_tokens": 12, "request_id": "other"})
    for _ in range(5):
        with pose(cramped_server.url, endpoint, transport, {**body, "max_tokens": 400}) as connection:
            assert connection.recv(64)
        heard = ask(cramped_server.url, endpoint, transport, {**body, "max_tokens": 12})
        assert heard.id[-5:] in ("-mine", "_mine")
        assert heard.text == expected.text


def test_others_are_answered_while_huge_prompts_are_looked_at(cramped_server):
    """Which come to more than all tokens that fit, so that nobody need tokenise them."""
    stop = threading.Event()
    statuses = []

    def send():
        while not stop.is_set():
            statuses.append(
                httpx.post(
                    cramped_server.url + PATHS[COMPLETION],
                    content=b'{"prompt":"' + b"word " * 1_000_000 + b'"}',
                    headers={"content-type": "application/json"},
                    timeout=300,
                ).status_code
            )

    thread = threading.Thread(target=send)
    thread.start()
    try:
        for _ in range(30):
            assert httpx.get(f"{cramped_server.url}/health", timeout=10).status_code == 200
            ask(cramped_server.url, COMPLETION, SSE, {**MODEL, "prompt": "hi", "max_tokens": 3})
    finally:
        stop.set()
        thread.join(300)
    assert set(statuses) <= {400, 413}


@pytest.mark.parametrize(
    "transport", [SSE, *(pytest.param(name, marks=pytest.mark.heavy) for name in TRANSPORTS if name != SSE)]
)
def test_an_answer_longer_than_any_message_in_a_ring_wedges_nothing(tiny_server, untouched, transport):
    """Eight bytes for each of twenty-one log probabilities come to more than half of four megabytes."""
    ids = [5 + number % 400 for number in range(13_000)]
    body = {**MODEL, "prompt": ids, "echo": True, "logprobs": 20, "max_tokens": 1, "temperature": 0}
    said = ask(tiny_server.url, COMPLETION, transport, body).only
    assert len(said.tokens) == len(said.logprobs) == len(ids) + 1
    small = {**MODEL, "prompt": "Go on", "max_tokens": 4, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda _: ask(tiny_server.url, COMPLETION, transport, small), range(64))
        assert {heard.only.reason for heard in answers} == {"length"}
