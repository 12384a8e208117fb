"""Both clients and servers, proxies and networks that do not behave."""

from __future__ import annotations

import httpx
import pytest
from scripted_answers import (
    MESSAGES,
    SSE,
    WHOLE_STREAM,
    BrokenBody,
    Script,
    chat_chunk,
    event,
    refused,
    streamed,
)

from streamserve_client import (
    AnswerTimeout,
    AsyncClient,
    BadRequest,
    Client,
    ClientError,
    InvalidAnswer,
    ServerFailed,
    StreamInterrupted,
)

KEPT = {**SSE, "X-Stream-Id": "chatcmpl-r1"}
WHOLE_TEXT = "".join(WHOLE_STREAM)


def numbered(number, content):
    return f"id: chatcmpl-r1:{number}\n{event(chat_chunk(content))}"


def kept(*events):
    return httpx.Response(200, headers=KEPT, content="".join(events).encode())


def fresh(answer):
    """One that no other client has read."""
    if isinstance(answer, Exception):
        return answer
    return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + WHOLE_TEXT,
        WHOLE_TEXT.replace("\n", "\r\n"),
        WHOLE_TEXT.replace("\n", "\r"),
        ":\n: comment\nretry: 5\nunknown: x\nnothing\n\n" + WHOLE_TEXT,
        WHOLE_TEXT.replace('data: {"id"', 'data: {\ndata: "id"'),
    ],
    ids=["mark", "crlf", "cr", "other lines", "several lines"],
)
async def test_events_of_all_forms(make_client, text):
    assert (await make_client(Script(streamed(text))).read("chat", MESSAGES)).text == "Hello"


async def test_events_are_utf8_whatever_a_header_says(make_client):
    content = (event(chat_chunk("größe 你好")) + event("[DONE]")).encode()
    headers = {"content-type": "text/event-stream; charset=iso-8859-1"}
    script = Script(httpx.Response(200, headers=headers, content=content))
    assert (await make_client(script).read("chat", MESSAGES)).text == "größe 你好"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_nesting_without_an_end_is_no_answer(make_client, is_stream):
    deep = "[" * 100_000
    answer = streamed(event(deep)) if is_stream else httpx.Response(200, content=deep.encode())
    client = make_client(Script(answer))
    with pytest.raises(InvalidAnswer):
        await (client.read("chat", MESSAGES) if is_stream else client.create("chat", MESSAGES))
    client = make_client(Script(httpx.Response(500, content=deep.encode())))
    with pytest.raises(ServerFailed):
        await client.create("chat", MESSAGES)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_redirect_names_the_other_place_and_does_not_bring_the_key_there(make_client, is_stream):
    script = Script(httpx.Response(307, headers={"Location": "https://elsewhere/v1"}))
    client = make_client(script, api_key="sesame")
    with pytest.raises(BadRequest, match="https://elsewhere/v1") as raised:
        await (client.read("chat", MESSAGES) if is_stream else client.create("chat", MESSAGES))
    assert raised.value.status == 307
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    "unknown",
    [
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(405, content=b"Method Not Allowed"),
        httpx.Response(501, content=b""),
        httpx.Response(200, json={"object": "stream"}),
    ],
    ids=["404", "405", "501", "another document"],
)
async def test_a_server_that_keeps_no_streams_is_asked_again(make_client, unknown):
    script = Script(httpx.ReadError("broken"), fresh(unknown), streamed(*WHOLE_STREAM))
    client = make_client(script)
    assert (await client.read("chat", MESSAGES)).text == "Hello"
    assert [request.method for request in script.requests] == ["POST", "GET", "POST"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (httpx.ReadTimeout("late"), AnswerTimeout),
        (httpx.Response(504, content=b"<html>"), ServerFailed),
        (kept(numbered(1, "a"), "id: chatcmpl-r1:2\ndata: nonsense\n\n"), InvalidAnswer),
    ],
    ids=["late", "of a proxy", "nonsense"],
)
async def test_what_the_client_gives_up_ends_on_the_server(make_client, answer, kind):
    script = Script(fresh(answer))
    with pytest.raises(kind):
        await make_client(script).read("chat", MESSAGES, request_id="r1")
    assert script.ended == ["/v1/streams/chatcmpl-r1"]


async def test_what_the_server_refused_is_not_there_to_be_ended(make_client):
    script = Script(refused(400, "invalid_request"))
    with pytest.raises(BadRequest):
        await make_client(script).read("chat", MESSAGES)
    assert script.ended == []


async def test_events_without_numbers_are_not_asked_for_twice(make_client):
    script = Script(kept(event(chat_chunk("a"))))
    with pytest.raises(StreamInterrupted) as raised:
        await make_client(script).read("chat", MESSAGES)
    assert raised.value.partial_text == "a"
    assert len(script.requests) == 1


async def test_events_that_come_again_are_passed_over_and_missing_ones_fetched(make_client):
    script = Script(
        kept(numbered(1, "a"), numbered(2, "b"), numbered(2, "b"), numbered(4, "d")),
        kept(numbered(1, "a"), numbered(2, "b"), numbered(3, "c"), "id: chatcmpl-r1:4\n" + event("[DONE]")),
    )
    assert (await make_client(script).read("chat", MESSAGES)).text == "abc"
    assert script.requests[1].headers["Last-Event-ID"] == "chatcmpl-r1:2"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize(
    "first", [httpx.ReadError("broken"), kept(numbered(1, "a"))], ids=["unknown", "begun"]
)
async def test_who_comes_back_too_early_comes_again(make_client, first, status):
    rest = kept(*[numbered(1, "a")][: isinstance(first, Exception)], "id: chatcmpl-r1:2\n" + event("[DONE]"))
    script = Script(fresh(first), httpx.Response(status, content=b"<html>"), rest)
    assert (await make_client(script).read("chat", MESSAGES, request_id="r1")).text == "a"
    assert [request.method for request in script.requests] == ["POST", "GET", "GET"]


async def test_the_streams_own_last_error_may_be_one_that_passes(make_client):
    """It is not the connection's: whoever comes back gets the same."""
    error = {"error": {"message": "No.", "type": "service_unavailable_error", "code": "c", "status": 503}}
    script = Script(kept(numbered(1, "a"), "id: chatcmpl-r1:2\n" + event(error)))
    with pytest.raises(ServerFailed):
        await make_client(script).read("chat", MESSAGES)
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("http://host/v1?key=1", {}, "path"),
        ("http://host:99999", {}, "port"),
        ("http://host", {"api_key": "sesame\n"}, "api_key"),
        ("http://host", {"api_key": "sésame"}, "api_key"),
        ("http://host", {"api_key": ""}, "api_key"),
    ],
)
def test_what_cannot_be_sent_is_said_at_once(url, options, reason):
    with pytest.raises(ValueError, match=reason) as raised:
        Client(url, **options)
    assert "same" not in str(raised.value)


def test_a_scheme_in_capitals(monkeypatch):
    with Client("HTTP://http.example/") as client:
        assert client._http._settings.socket_url == "ws://http.example/v1/ws"


def test_closing_a_client_ends_what_is_read_and_leaving_that_later_is_quiet():
    script = Script(kept(numbered(1, "a"), numbered(2, "b")))
    with httpx.Client(transport=httpx.MockTransport(script)) as http:
        client = Client("http://server.example", http_client=http)
        stream = client.chat.stream(MESSAGES, request_id="r1")
        next(stream)
        client.close()
        assert script.ended == ["/v1/streams/chatcmpl-r1"]
        stream.close()
    assert script.ended == ["/v1/streams/chatcmpl-r1"]
    with pytest.raises(ClientError, match="closed"):
        client.chat.create(MESSAGES)
    with pytest.raises(ClientError, match="closed"):
        next(client.chat.stream(MESSAGES))


async def test_closing_a_client_closes_what_nobody_reads_on():
    """Else Python does, when the loop is gone that it needs for that."""
    body = BrokenBody(numbered(1, "a"), numbered(2, "b"))
    script = Script(httpx.Response(200, headers=KEPT, stream=body))
    async with httpx.AsyncClient(transport=httpx.MockTransport(script)) as http:
        async with AsyncClient("http://server.example", http_client=http) as client:
            stream = client.chat.stream(MESSAGES, request_id="r1")
            await anext(stream)
            unread = client.chat.stream(MESSAGES)
        assert body.is_closed
        assert script.ended == ["/v1/streams/chatcmpl-r1"]
        with pytest.raises(ClientError, match="closed"):
            await anext(unread)
