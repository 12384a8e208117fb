"""The chat page when connections are lost in the middle of an answer, or the page is."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from browser_chat import Chat, events, violations
from cut_proxy import CutProxy, cut_proxy
from server import load

pytestmark = pytest.mark.browser

TRANSPORTS = pytest.mark.parametrize("transport", ["Server-sent events", "WebSocket"])
QUESTION = "Tell me about rivers."
NUM_TOKENS = 300


@pytest.fixture
def proxy(tiny_server):
    with cut_proxy(tiny_server.url) as proxy:
        yield proxy


@pytest.fixture
def far(browse, proxy) -> Chat:
    """The page with a slow proxy between it and its server, asking for a long answer of one wording."""
    chat = Chat(browse().new_page(), proxy.url).open()
    chat.set(Max_tokens=str(NUM_TOKENS), Temperature="0")
    return chat


@pytest.fixture(scope="module")
def whole(tiny_server) -> str:
    """The answer as it is when nothing goes wrong."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{tiny_server.url}/v1/chat/completions", json=body, timeout=300).json()
    return answer["choices"][0]["message"]["content"]


def ask(chat: Chat, proxy: CutProxy, num_chars: int = 60) -> None:
    """Asks, and waits until some of the answer is there; the rest will take a while."""
    proxy.is_slow = True
    chat.say(QUESTION)
    chat.until_written(num_chars)
    assert chat.page.locator("[aria-busy=true]").count() == 1


def num_expired(server: Any) -> float:
    """Streams for which nobody has come back in time."""
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    (found,) = re.findall(r"^streamserve:streams_expired_total.* ([0-9.e+]+)$", text, re.MULTILINE)
    return float(found)


def streams_asked_for(page: Any) -> list[str]:
    """What the page asks for from now on of streams: methods and addresses."""
    asked: list[str] = []
    page.on(
        "request",
        lambda request: (
            asked.append(f"{request.method} {request.url}") if "/v1/streams/" in request.url else None
        ),
    )
    return asked


@TRANSPORTS
def test_a_lost_connection_is_made_again(far, proxy, whole, transport):
    far.set(transport)
    ask(far, proxy)
    note = far.page.locator(".reconnecting")
    for num_outages in (1, 2):
        proxy.cut()
        note.wait_for()
        # Several tries later it has been told to screen readers once.
        far.page.wait_for_timeout(1500)
        told = far.page.locator("#announcer p").all_inner_texts()
        assert told.count("Reconnecting…") == num_outages
        assert violations(far.page) == []
        length = len(far.answers[0])
        proxy.reopen()
        far.until_written(length)
        note.wait_for(state="hidden")
    proxy.is_slow = False
    far.until_answered()
    assert far.stored_answers == [whole]
    assert far.page.locator(".speed").inner_text().startswith(f"{NUM_TOKENS} tokens")


@TRANSPORTS
def test_a_reload_goes_on(far, proxy, whole, transport):
    far.set(transport)
    ask(far, proxy)
    far.page.reload()
    far.until_written(100)
    proxy.is_slow = False
    far.until_answered()
    assert far.stored_answers == [whole]
    assert far.page.locator(".speed").inner_text().startswith(f"{NUM_TOKENS} tokens")


def test_an_answer_that_another_conversation_hides_goes_on_after_a_reload(far, proxy, whole):
    ask(far, proxy)
    far.page.get_by_role("button", name="New chat").click()
    far.page.reload()
    proxy.is_slow = False
    far.page.get_by_role("button", name=QUESTION, exact=True).click()
    far.page.locator(".bubble").wait_for()
    far.until_answered()
    assert far.stored_answers == [whole]


def test_of_several_tabs_one_goes_on(far, proxy, whole):
    others = [Chat(far.page.context.new_page(), proxy.url).open() for _ in range(2)]
    asked = [streams_asked_for(other.page) for other in others]
    ask(far, proxy)
    address = far.page.evaluate("location.hash")
    for other in others:
        other.page.evaluate(f"location.hash = '{address}'")
    for other in others:
        other.until_written(60)
    far.page.close()
    others[0].wait(lambda: any(asked), "one comes back")
    proxy.is_slow = False
    for other in others:
        other.until_answered()
    assert [other.stored_answers for other in others] == [[whole]] * 2
    assert [other.answers for other in others] == [others[0].answers] * 2
    assert sum(map(len, asked)) == 1


@pytest.mark.parametrize("arrived", [True, False])
def test_a_request_whose_answer_never_came_is_not_made_twice(far, tiny_server, whole, arrived):
    posted = []

    def lose(route):
        posted.append(route.request.headers["x-request-id"])
        if len(posted) > 1:
            route.continue_()
            return
        if arrived:
            headers = {name: route.request.headers[name] for name in ("x-request-id", "x-stream-resume")}
            url = f"{tiny_server.url}/v1/chat/completions"
            body = route.request.post_data_json
            with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as response:
                next(response.iter_raw())
        route.abort()

    far.page.route("**/v1/chat/completions", lose)
    asked = streams_asked_for(far.page)
    far.say(QUESTION)
    far.until_written(100)
    far.until_answered()
    assert far.stored_answers == [whole]
    assert len(posted) == (1 if arrived else 2)
    assert asked == [f"GET {far.url}/v1/streams/chatcmpl-{posted[0]}"]


def test_a_request_that_arrives_after_it_was_stopped_does_not_run(far, tiny_server):
    held: list[Any] = []

    def hold(route):
        held.append(route)

    far.endless()
    far.set(Max_tokens="")
    far.page.route("**/v1/chat/completions", hold)
    answered = []
    far.page.on(
        "response",
        lambda answer: answered.append(answer.status) if answer.request.method == "DELETE" else None,
    )
    expired = num_expired(tiny_server)
    far.say(QUESTION)
    far.wait(lambda: held, "it is asked")
    far.page.get_by_role("button", name="Stop").click()
    far.notice("Stopped.").wait_for()
    far.wait(lambda: answered == [404], "it is not there")
    # As a proxy does that had it.
    request = held[0].request
    headers = {name: request.headers[name] for name in ("x-request-id", "x-stream-resume")}
    url = f"{tiny_server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=request.post_data_json, headers=headers, timeout=300) as response:
        next(response.iter_raw())
    far.wait(lambda: answered[-1] == 200, "it is ended")
    far.wait(lambda: load(tiny_server)["running"] == 0, "the request is gone")
    assert num_expired(tiny_server) == expired


def test_a_way_back_that_says_nothing_is_given_up(far, proxy, whole):
    ask(far, proxy)
    far.page.clock.install()
    silent: list[Any] = []

    def say_nothing(route):
        silent.append(route)

    far.page.route("**/v1/streams/*", say_nothing)
    proxy.cut()
    proxy.reopen()
    proxy.is_slow = False
    # Until it has asked, and then for long enough.
    while not silent:
        far.page.clock.run_for(500)
    far.page.unroute_all()
    far.page.clock.run_for(21_000)
    far.page.clock.resume()
    far.until_answered()
    assert far.stored_answers == [whole]


def test_an_answer_that_has_waited_may_be_refused(chat):
    busy = {"message": "Not now.", "code": "queue_time_exceeded", "status": 503, "retry_after": 3}
    refused = f": ping\n\ndata: {json.dumps({'error': busy})}\n\n".encode()
    chat.script(refused, events("Here."))
    chat.say(QUESTION)
    chat.notice("The server is busy").wait_for()
    chat.until_answered()
    assert chat.answers == ["Here."]


@pytest.mark.parametrize(("status", "code"), [(404, "stream_not_found"), (410, "events_gone")])
def test_a_stream_that_is_gone_leaves_what_had_come(far, proxy, status, code):
    error = json.dumps({"error": {"message": "Gone.", "code": code}})
    ask(far, proxy)
    far.page.route("**/v1/streams/*", lambda route: route.fulfill(status=status, body=error))
    proxy.cut()
    far.notice("The connection was lost before the answer was whole.").wait_for()
    assert len(far.answers[0]) > 50
    assert far.page.get_by_role("button", name="Continue").is_visible()
    # So it is after a reload.
    far.page.unroute_all()
    proxy.reopen()
    proxy.is_slow = False
    asked = streams_asked_for(far.page)
    far.page.reload()
    far.notice("The connection was lost before the answer was whole.").wait_for()
    assert asked == []


def test_the_time_that_the_server_asks_for_is_waited(far, proxy, whole):
    busy = json.dumps({"error": {"message": "Not now.", "code": "engine_unavailable"}})
    ask(far, proxy)
    answers = [{"status": 503, "body": busy, "headers": {"Retry-After": "3"}}]
    times = []

    def answer(route):
        times.append(far.page.evaluate("performance.now()"))
        if answers:
            route.fulfill(**answers.pop())
        else:
            route.continue_()

    far.page.route("**/v1/streams/*", answer)
    proxy.cut()
    proxy.reopen()
    proxy.is_slow = False
    far.until_answered()
    assert far.stored_answers == [whole]
    # No early third try either.
    assert len(times) == 2
    assert times[1] - times[0] > 2900


@TRANSPORTS
def test_what_is_not_wanted_any_more_ends_on_the_server(far, proxy, tiny_server, transport):
    far.endless()
    far.set(transport, Max_tokens="")
    ask(far, proxy)
    asked = streams_asked_for(far.page)
    far.page.get_by_role("button", name="Stop").click()
    far.notice("Stopped.").wait_for()
    far.wait(lambda: load(tiny_server)["running"] == 0, "the request is gone")
    assert [line.split()[0] for line in asked] == ["DELETE"]
    # A conversation that is deleted ends its answer as well.
    far.page.get_by_role("button", name="Try again").click()
    far.wait(lambda: load(tiny_server)["running"] == 1, "it runs")
    far.until_written(30)
    far.page.locator("li", has_text=QUESTION).hover()
    far.page.get_by_role("button", name=f"Delete {QUESTION}").click()
    far.wait(lambda: load(tiny_server)["running"] == 0, "the request is gone")
