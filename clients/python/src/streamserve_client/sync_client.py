"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, Unpack, cast
from urllib.parse import quote

import httpx

from streamserve_client.documents import ChatChunk, ChatCompletion, Completion, Response, ResponseEvent
from streamserve_client.endpoints import CHAT, COMPLETIONS, RESPONSES, Call, Endpoint
from streamserve_client.errors import ClientError
from streamserve_client.http_messages import ABANDON_S
from streamserve_client.options import (
    ChatMessage,
    ChatOptions,
    CompletionOptions,
    Prompt,
    ResponseInput,
    ResponseOptions,
)
from streamserve_client.place import Place
from streamserve_client.progress import Progress
from streamserve_client.retries import Attempts, Retries
from streamserve_client.settings import Settings, Timeouts
from streamserve_client.sync_http import HttpTransport
from streamserve_client.sync_socket import SocketTransport

Chunk = TypeVar("Chunk")
Answer = TypeVar("Answer")
Extra = Mapping[str, Any] | None


class Transport(Protocol):
    """What carries requests."""

    def answer(self, call: Call) -> dict[str, Any]: ...

    def events(self, call: Call, place: Place) -> Generator[dict[str, Any] | None]: ...


class Caller:
    """Makes requests, again where that makes sense.

    Args:
        transport: carries them.
        retries: when.
        sleep: waits between two tries.
        abandon: ends the stream at a path; raises nothing.
    """

    def __init__(
        self,
        transport: Transport,
        retries: Retries,
        sleep: Callable[[float], object],
        abandon: Callable[[str], object],
    ) -> None:
        self._transport = transport
        self._retries = retries
        self._sleep = sleep
        self._abandon = abandon
        self._places: set[Place] = set()

    def answer(self, call: Call) -> Any:
        """The answer in one piece."""
        attempts = Attempts(self._retries)
        while True:
            try:
                return self._transport.answer(call)
            except ClientError as error:
                delay_s = attempts.delay_s(error)
            self._sleep(delay_s)

    def chunks(self, call: Call, progress: Progress[Chunk, Any]) -> Generator[Chunk]:
        """The chunks of a stream, which `progress` keeps as well. Hot: one turn a chunk."""
        attempts = Attempts(self._retries)
        place = Place(call, is_kept=self._retries.resume_s > 0)
        self._places.add(place)
        try:
            while True:
                place.turn()
                try:
                    with closing(self._transport.events(call, place)) as events:
                        for event in events:
                            if event is None:
                                progress.end()
                            else:
                                yield progress.take(event)
                    progress.check_end()
                    return
                except ClientError as error:
                    if progress.is_complete:
                        return
                    if place.takes_turn(error):
                        continue
                    delay_s = attempts.stream_delay_s(error, place, has_begun=progress.has_begun)
                    if delay_s is None:
                        place.settle(error)
                        progress.fail(error, place)
                self._sleep(delay_s)
        finally:
            self._places.discard(place)
            if not progress.is_complete:
                self._leave(place)

    def close(self) -> None:
        """Ends all streams that are being read."""
        deadline_s = time.monotonic() + ABANDON_S
        for place in list(self._places):
            if time.monotonic() < deadline_s:
                self._leave(place)

    def _leave(self, place: Place) -> None:
        # The server would wait for somebody to come back.
        if place.may_exist:
            place.forget()
            self._abandon(place.path)


class Stream(Generic[Chunk, Answer]):
    """An answer as it is made: an iterator of its chunks, and a context manager.

    The request is made when the first chunk is asked for. Leaving the context, and `close`, end the
    generation on the server; so does dropping the stream, as a `break` does where only the loop
    had it.

    Iterating raises the errors of `streamserve_client.errors`; StreamInterrupted if the connection is lost
    and there is no going on.
    """

    def __init__(self, caller: Caller, endpoint: Endpoint[Chunk, Answer], call: Call) -> None:
        self._progress = Progress(endpoint.accumulator())
        self._chunks = caller.chunks(call, self._progress)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def text(self) -> str:
        """What has come so far of the first choice."""
        return self._progress.text

    def texts(self) -> Iterator[str]:
        """The rest of the first choice's text, piece by piece."""
        for chunk in self._chunks:
            if text := self._progress.text_of(chunk):
                yield text

    def result(self) -> Answer:
        """The whole answer, once the rest has come. Of a stream that was closed, what had come."""
        for _ in self._chunks:
            pass
        return self._progress.answer()

    def close(self) -> None:
        """Ends the generation, if it has not come to its end."""
        self._chunks.close()


class Chat:
    """Conversations."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def create(
        self, messages: Sequence[ChatMessage], *, extra_body: Extra = None, **options: Unpack[ChatOptions]
    ) -> ChatCompletion:
        """The next turn, in one piece."""
        return cast(ChatCompletion, self._caller.answer(CHAT.call(messages, options, extra_body)))

    def stream(
        self, messages: Sequence[ChatMessage], *, extra_body: Extra = None, **options: Unpack[ChatOptions]
    ) -> Stream[ChatChunk, ChatCompletion]:
        """The next turn, as it is made."""
        return Stream(self._caller, CHAT, CHAT.stream_call(messages, options, extra_body))


class Completions:
    """Texts that go on."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def create(
        self, prompt: Prompt, *, extra_body: Extra = None, **options: Unpack[CompletionOptions]
    ) -> Completion:
        """How the text goes on, in one piece."""
        return cast(Completion, self._caller.answer(COMPLETIONS.call(prompt, options, extra_body)))

    def stream(
        self, prompt: Prompt, *, extra_body: Extra = None, **options: Unpack[CompletionOptions]
    ) -> Stream[Completion, Completion]:
        """How the text goes on, as it is made."""
        return Stream(self._caller, COMPLETIONS, COMPLETIONS.stream_call(prompt, options, extra_body))


class Responses:
    """OpenAI's Responses API."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def create(
        self, input: ResponseInput, *, extra_body: Extra = None, **options: Unpack[ResponseOptions]
    ) -> Response:
        """A response, in one piece."""
        return cast(Response, self._caller.answer(RESPONSES.call(input, options, extra_body)))

    def stream(
        self, input: ResponseInput, *, extra_body: Extra = None, **options: Unpack[ResponseOptions]
    ) -> Stream[ResponseEvent, Response]:
        """A response, as it is made."""
        return Stream(self._caller, RESPONSES, RESPONSES.stream_call(input, options, extra_body))


class Client:
    """A streamserve server, for programs with threads. May be used by several of them; a context manager.

    Args:
        url: of the server, with or without `/v1` behind it.
        api_key: where the server wants one.
        transport: `sse` is HTTP, with a connection for each stream; `websocket` has all over one connection.
        timeouts: how long to wait for what.
        retries: when to ask again.
        http_client: sends the requests over HTTP, with its own proxies and certificates; stays open.
        sleep: waits between two tries.

    Attributes:
        chat, completions, responses: the endpoints; each has `create` and `stream`.

    Raises:
        ValueError: `url` is no address of a web server.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        transport: Literal["sse", "websocket"] = "sse",
        timeouts: Timeouts = Timeouts(),  # noqa: B008  (frozen)
        retries: Retries = Retries(),  # noqa: B008  (frozen)
        http_client: httpx.Client | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        settings = Settings(url, api_key, timeouts)
        self._http = HttpTransport(settings, http_client)
        self._socket = SocketTransport(settings) if transport == "websocket" else None
        caller = self._caller = Caller(self._socket or self._http, retries, sleep, self._http.abandon)
        self.chat = Chat(caller)
        self.completions = Completions(caller)
        self.responses = Responses(caller)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cancel(self, answer_id: str) -> None:
        """Ends an answer that is being made, from anywhere: its text so far stands, with the reason `abort`.

        Raises:
            NotFound: there is none with this id, or no more.
        """
        self._http.delete(f"/v1/streams/{quote(answer_id, safe='')}")

    def close(self) -> None:
        """Closes all connections, and so ends what is being made over them."""
        if self._socket is not None:
            self._socket.close()
        self._caller.close()
        self._http.close()
