"""Both clients over HTTP, with scripted answers instead of a server."""

from __future__ import annotations

import httpx
import pytest
from scripted_answers import (
    HEAD,
    MESSAGES,
    SSE,
    USAGE,
    WHOLE_STREAM,
    BrokenBody,
    Script,
    chat_chunk,
    event,
    refused,
    streamed,
)

import streamserve_client as package
from streamserve_client import (
    APIError,
    BadRequest,
    ClientError,
    ConnectionFailed,
    InvalidAnswer,
    RateLimited,
    Retries,
    ServiceUnavailable,
    StreamInterrupted,
)


class EndlessBody(BrokenBody):
    """The same bytes for ever."""

    def __iter__(self):
        while True:
            yield self.data

    async def __aiter__(self):
        while True:
            yield self.data


async def test_a_stream_adds_up_to_a_whole_answer(make_client):
    script = Script(streamed(*WHOLE_STREAM))
    reading = await make_client(script, api_key="sesame").read("chat", MESSAGES, max_tokens=5)
    assert len(reading.chunks) == 5
    assert reading.text == "Hello"
    choice = reading.result["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello"}
    assert choice["finish_reason"] == "stop"
    assert reading.result["usage"] == USAGE
    assert reading.result["object"] == "chat.completion"
    (request,) = script.requests
    assert request.url == "http://server.example/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer sesame"
    assert script.bodies == [
        {
            "messages": MESSAGES,
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize("size", [1, 2, 7])
async def test_events_may_be_cut_anywhere(make_client, size):
    text = "".join(event(chat_chunk(piece)) for piece in ("größe ", "\u2028 你好", " \r\n")) + event("[DONE]")
    data = text.encode()

    def handler(request):
        class Pieces(BrokenBody):
            def __iter__(self):
                yield from (data[at : at + size] for at in range(0, len(data), size))

            async def __aiter__(self):
                for piece in self.__iter__():
                    yield piece

        return httpx.Response(200, headers=SSE, stream=Pieces())

    reading = await make_client(handler).read("chat", MESSAGES)
    assert reading.text == "größe \u2028 你好 \r\n"


async def test_whole_answers_and_other_fields(make_client):
    script = Script(httpx.Response(200, json={"choices": []}), httpx.Response(200, json={"output": []}))
    client = make_client(script, url="https://server.example/prefix/v1/")
    await client.create("completions", "Once", extra_body={"future": 1}, top_k=2)
    await client.create("responses", "Hello")
    assert [str(request.url) for request in script.requests] == [
        "https://server.example/prefix/v1/completions",
        "https://server.example/prefix/v1/responses",
    ]
    assert script.bodies == [{"prompt": "Once", "future": 1, "top_k": 2}, {"input": "Hello"}]


@pytest.mark.parametrize("stream_options", [{}, {"include_usage": False}])
async def test_the_caller_decides_about_token_counts(make_client, stream_options):
    script = Script(streamed(*WHOLE_STREAM))
    await make_client(script).read("chat", MESSAGES, stream_options=stream_options)
    assert script.bodies[0]["stream_options"] == stream_options


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "BadRequest"),
        (401, "AuthenticationFailed"),
        (403, "PermissionDenied"),
        (404, "NotFound"),
        (413, "BadRequest"),
        (500, "ServerFailed"),
        (502, "ServerFailed"),
    ],
)
async def test_an_error_is_what_the_server_says(make_client, is_stream, status, kind):
    answer = refused(
        status, "some_code", {"X-Request-Id": "r1"}, param="top_k", message="top_k is too large."
    )
    script = Script(answer)
    client = make_client(script)
    with pytest.raises(getattr(package, kind)) as raised:
        await (client.read("chat", MESSAGES) if is_stream else client.create("chat", MESSAGES))
    error = raised.value
    assert type(error).__name__ == kind
    assert (error.status, error.type, error.code, error.param) == (status, "some_error", "some_code", "top_k")
    assert (error.message, error.request_id) == ("top_k is too large.", "r1")
    assert str(error) == f"top_k is too large. ({status}, some_code)"
    assert client.delays == []
    assert len(script.requests) == 1


@pytest.mark.parametrize("body", [b"<html>Bad gateway</html>", b"", b'{"error": "No."}', b"[]", b"\xff"])
async def test_errors_of_others_than_the_server(make_client, body):
    client = make_client(Script(httpx.Response(502, content=body)))
    with pytest.raises(package.ServerFailed) as raised:
        await client.create("chat", MESSAGES)
    assert raised.value.status == 502
    assert raised.value.message


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_passes_is_tried_again(make_client, is_stream):
    last = streamed(*WHOLE_STREAM) if is_stream else httpx.Response(200, json={"choices": ["the answer"]})
    script = Script(
        refused(429, "overloaded", {"Retry-After": "3"}),
        refused(503, "engine_unavailable"),
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("closed"),
        last,
    )
    client = make_client(script)
    if is_stream:
        assert (await client.read("chat", MESSAGES)).text == "Hello"
    else:
        assert await client.create("chat", MESSAGES) == {"choices": ["the answer"]}
    assert client.delays == [3.5, 1.0, 2.0, 4.0]
    # Where a stream may have begun, it is looked for.
    asked = [request for request in script.requests if request.method == "POST"]
    assert len(asked) == (4 if is_stream else 5)
    assert len({request.content for request in asked}) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tries_are_limited(make_client, is_stream):
    script = Script(*(refused(503, "engine_unavailable") for _ in range(3)), refused(429, "overloaded"))
    client = make_client(script, retries=Retries(2, chance=lambda: 1.0))
    with pytest.raises(ServiceUnavailable):
        await (client.read("chat", MESSAGES) if is_stream else client.create("chat", MESSAGES))
    assert client.delays == [0.5, 1.0]


async def test_a_server_that_names_a_long_time_is_believed(make_client):
    client = make_client(Script(refused(429, "overloaded", {"Retry-After": "3600"})))
    with pytest.raises(RateLimited) as raised:
        await client.create("chat", MESSAGES)
    assert raised.value.retry_after_s == 3600
    assert client.delays == []


@pytest.mark.parametrize("error", [httpx.ReadError, httpx.RemoteProtocolError, httpx.ReadTimeout])
async def test_a_broken_stream_tells_what_had_come_and_is_not_begun_anew(make_client, error):
    body = BrokenBody(*WHOLE_STREAM[:3], error=error)
    script = Script(httpx.Response(200, headers=SSE, stream=body))
    client = make_client(script)
    with pytest.raises(StreamInterrupted) as raised:
        await client.read("chat", MESSAGES)
    assert raised.value.partial_text == "Hel"
    choice = raised.value.partial_answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hel", None)
    assert isinstance(raised.value.__cause__, ConnectionFailed)
    assert client.delays == []
    assert body.is_closed


async def test_a_stream_without_its_end_is_broken(make_client):
    with pytest.raises(StreamInterrupted) as raised:
        await make_client(Script(streamed(*WHOLE_STREAM[:-1]))).read("chat", MESSAGES)
    assert raised.value.partial_text == "Hello"


async def test_a_stream_that_breaks_before_its_first_chunk_is_begun_again(make_client):
    nothing = httpx.Response(200, headers=SSE, stream=BrokenBody(": ping\n\n"))
    client = make_client(Script(nothing, streamed(), streamed(*WHOLE_STREAM)))
    assert (await client.read("chat", MESSAGES)).text == "Hello"
    assert client.delays == [0.5, 1.0]


async def test_what_breaks_behind_the_end_does_not_matter(make_client):
    whole = httpx.Response(200, headers=SSE, stream=BrokenBody(*WHOLE_STREAM))
    assert (await make_client(Script(whole)).read("chat", MESSAGES)).text == "Hello"


@pytest.mark.parametrize(
    ("type_name", "kind"),
    [
        ("service_unavailable_error", ServiceUnavailable),
        ("invalid_request_error", BadRequest),
        ("server_error", package.ServerFailed),
    ],
)
async def test_an_error_in_a_stream(make_client, type_name, kind):
    error = {"error": {"message": "The engine died.", "type": type_name, "param": None, "code": "c"}}
    script = Script(streamed(*WHOLE_STREAM[:3], event(error)))
    client = make_client(script)
    with pytest.raises(kind) as raised:
        await client.read("chat", MESSAGES)
    assert (raised.value.status, raised.value.code, raised.value.message) == (None, "c", "The engine died.")
    assert client.delays == []


async def test_leaving_a_stream_closes_its_connection(make_client):
    body = EndlessBody(event(chat_chunk("x")))
    reading = await make_client(Script(httpx.Response(200, headers=SSE, stream=body))).read(
        "chat", MESSAGES, limit=3
    )
    assert body.is_closed
    assert reading.text == "xxx"
    assert reading.result["choices"][0]["finish_reason"] is None
    assert reading.result["usage"] is None


HTML = {"content-type": "text/html"}


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        ("<html>", HTML),
        ("data: {\n\n", SSE),
        ("data: []\n\n", SSE),
        (event({"hello": "world"}), SSE),
        (event({**HEAD, "choices": [{"index": 0}]}), SSE),
        (event({**HEAD, "choices": 1}), SSE),
    ],
)
async def test_what_is_no_stream(make_client, text, headers):
    client = make_client(Script(httpx.Response(200, text=text, headers=headers)))
    with pytest.raises(InvalidAnswer):
        await client.read("chat", MESSAGES)
    assert client.delays == []


async def test_what_is_no_answer(make_client):
    with pytest.raises(InvalidAnswer):
        await make_client(Script(httpx.Response(200, text="hello"))).create("chat", MESSAGES)


async def test_a_request_that_cannot_be_sent_is_not_tried_again(make_client):
    client = make_client(Script(httpx.LocalProtocolError("Illegal header value")))
    with pytest.raises(ClientError):
        await client.create("chat", MESSAGES)
    assert client.delays == []


async def test_an_answer_that_does_not_begin_in_time(make_client):
    client = make_client(Script(httpx.ReadTimeout("late")))
    with pytest.raises(package.AnswerTimeout):
        await client.read("chat", MESSAGES)
    assert client.delays == []


async def test_cancel_by_id(make_client):
    script = Script(httpx.Response(200, json={"id": "a/b"}), refused(404, "stream_not_found"))
    client = make_client(script, api_key="sesame")
    await client.cancel("a/b")
    assert script.requests[0].method == "DELETE"
    assert script.requests[0].url.raw_path == b"/v1/streams/a%2Fb"
    with pytest.raises(package.NotFound):
        await client.cancel("over")


@pytest.mark.parametrize("url", ["server.example", "ftp://server.example", "http://", ""])
def test_a_url_must_be_one(url):
    with pytest.raises(ValueError, match="url must begin with"):
        package.Client(url)


def test_the_key_is_not_shown():
    from streamserve_client.settings import Settings

    assert "sesame" not in repr(Settings("http://server.example", "sesame"))


def test_every_error_is_one_of_the_tree():
    kinds = [getattr(package, name) for name in package.__all__]
    errors = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(errors) == 13
    assert all(issubclass(kind, ClientError) for kind in errors)
    assert issubclass(ServiceUnavailable, APIError)
