"""What a server answers over HTTP, and a server that answers so, for clients under test."""

from __future__ import annotations

import json

import httpx

HEAD = {"id": "chatcmpl-1", "created": 1, "model": "tiny"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
MESSAGES = [{"role": "user", "content": "Hello"}]
SSE = {"content-type": "text/event-stream; charset=utf-8"}


def chat_chunk(content=None, index=0, **more):
    delta = {} if content is None else {"content": content}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
    return {**HEAD, "object": "chat.completion.chunk", "choices": [choice], "usage": None}


def event(data, name=None):
    data = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "") + f"data: {data}\n\n"


def streamed(*events):
    return httpx.Response(200, headers=SSE, content="".join(events).encode())


def refused(status, code, headers=None, **more):
    error = {"message": "No.", "type": "some_error", "param": None, "code": code, **more}
    return httpx.Response(status, json={"error": error}, headers=headers)


WHOLE_STREAM = (
    event(chat_chunk("")),
    ": ping\n\n",
    event(chat_chunk("Hel")),
    event(chat_chunk("lo")),
    event(chat_chunk(finish_reason="stop")),
    event({**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}),
    event("[DONE]"),
)


class Script:
    """Answers one request after the other; an exception is raised. Streams that are ended are not there."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.ended = []

    def __call__(self, request):
        if request.method == "DELETE" and not self.answers:
            self.ended.append(request.url.path)
            return refused(404, "stream_not_found")
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def bodies(self):
        return [json.loads(request.content) for request in self.requests]


class BrokenBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Some bytes, then the connection is gone."""

    def __init__(self, *events, error=httpx.ReadError):
        self.data, self.error, self.is_closed = "".join(events).encode(), error, False

    def __iter__(self):
        yield self.data
        raise self.error("gone")

    async def __aiter__(self):
        yield self.data
        raise self.error("gone")

    def close(self):
        self.is_closed = True

    async def aclose(self):
        self.is_closed = True
