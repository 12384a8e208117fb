"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from types import AsyncGeneratorType, TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, Unpack, cast
from urllib.parse import quote
from weakref import WeakValueDictionary

import httpx

from streamserve_client.async_http import AsyncHttpTransport
from streamserve_client.async_socket import AsyncSocketTransport
from streamserve_client.documents import ChatChunk, ChatCompletion, Completion, Response, ResponseEvent
from streamserve_client.endpoints import CHAT, COMPLETIONS, RESPONSES, Call, Endpoint
from streamserve_client.errors import ClientError
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

Chunk = TypeVar("Chunk")
Answer = TypeVar("Answer")
Extra = Mapping[str, Any] | None


class Transport(Protocol):
    """What carries requests."""

    async def answer(self, call: Call) -> dict[str, Any]: ...

    def events(self, call: Call, place: Place) -> AsyncGenerator[dict[str, Any] | None]: ...


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
        sleep: Callable[[float], Awaitable[object]],
        abandon: Callable[[str], Awaitable[object]],
    ) -> None:
        self._transport = transport
        self._retries = retries
        self._sleep = sleep
        self._abandon = abandon
        # Streams that have begun, and what reads them.
        self._places: set[Place] = set()
        self._readers: WeakValueDictionary[Place, AsyncGeneratorType[Any, None]] = WeakValueDictionary()

    async def answer(self, call: Call) -> Any:
        """The answer in one piece."""
        attempts = Attempts(self._retries)
        while True:
            try:
                return await self._transport.answer(call)
            except ClientError as error:
                delay_s = attempts.delay_s(error)
            await self._sleep(delay_s)

    def chunks(self, call: Call, progress: Progress[Chunk, Any]) -> AsyncGenerator[Chunk]:
        """The chunks of a stream, which `progress` keeps as well."""
        place = Place(call, is_kept=self._retries.resume_s > 0)
        chunks = self._read(call, place, progress)
        self._readers[place] = cast(AsyncGeneratorType[Chunk, None], chunks)
        return chunks

    async def _read(self, call: Call, place: Place, progress: Progress[Chunk, Any]) -> AsyncGenerator[Chunk]:
        """Hot: one turn a chunk."""
        attempts = Attempts(self._retries)
        self._places.add(place)
        try:
            while True:
                place.turn()
                try:
                    async with aclosing(self._transport.events(call, place)) as events:
                        async for event in events:
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
                await self._sleep(delay_s)
        finally:
            self._places.discard(place)
            if not progress.is_complete:
                await self._leave(place)

    async def close(self) -> None:
        """Ends all streams that are being read."""
        await asyncio.gather(*map(self._end, list(self._places)))

    async def _end(self, place: Place) -> None:
        reader = self._readers.get(place)
        if reader is None or reader.ag_running:
            # Whoever waits for the next chunk hears that there is none.
            await self._leave(place)
        else:
            # Python would close it, and all that it has opened, at once, and each stumble over the other.
            await reader.aclose()

    async def _leave(self, place: Place) -> None:
        # The server would wait for somebody to come back.
        if place.may_exist:
            place.forget()
            await self._abandon(place.path)


class AsyncStream(Generic[Chunk, Answer]):
    """An answer as it is made: an asynchronous iterator of its chunks, and a context manager.

    The request is made when the first chunk is asked for. Leaving the context, and `close`, end the
    generation on the server; so does cancelling the task that reads it, and dropping the stream, as a `break`
    does where only the loop had it.

    Iterating raises the errors of `streamserve_client.errors`; StreamInterrupted if the connection is lost
    and there is no going on.
    """

    def __init__(self, caller: Caller, endpoint: Endpoint[Chunk, Answer], call: Call) -> None:
        self._progress = Progress(endpoint.accumulator())
        self._chunks = caller.chunks(call, self._progress)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def text(self) -> str:
        """What has come so far of the first choice."""
        return self._progress.text

    async def texts(self) -> AsyncIterator[str]:
        """The rest of the first choice's text, piece by piece."""
        async for chunk in self._chunks:
            if text := self._progress.text_of(chunk):
                yield text

    async def result(self) -> Answer:
        """The whole answer, once the rest has come. Of a stream that was closed, what had come."""
        async for _ in self._chunks:
            pass
        return self._progress.answer()

    async def close(self) -> None:
        """Ends the generation, if it has not come to its end."""
        await self._chunks.aclose()


class AsyncChat:
    """Conversations."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def create(
        self, messages: Sequence[ChatMessage], *, extra_body: Extra = None, **options: Unpack[ChatOptions]
    ) -> ChatCompletion:
        """The next turn, in one piece."""
        return cast(ChatCompletion, await self._caller.answer(CHAT.call(messages, options, extra_body)))

    def stream(
        self, messages: Sequence[ChatMessage], *, extra_body: Extra = None, **options: Unpack[ChatOptions]
    ) -> AsyncStream[ChatChunk, ChatCompletion]:
        """The next turn, as it is made."""
        return AsyncStream(self._caller, CHAT, CHAT.stream_call(messages, options, extra_body))


class AsyncCompletions:
    """Texts that go on."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def create(
        self, prompt: Prompt, *, extra_body: Extra = None, **options: Unpack[CompletionOptions]
    ) -> Completion:
        """How the text goes on, in one piece."""
        return cast(Completion, await self._caller.answer(COMPLETIONS.call(prompt, options, extra_body)))

    def stream(
        self, prompt: Prompt, *, extra_body: Extra = None, **options: Unpack[CompletionOptions]
    ) -> AsyncStream[Completion, Completion]:
        """How the text goes on, as it is made."""
        return AsyncStream(self._caller, COMPLETIONS, COMPLETIONS.stream_call(prompt, options, extra_body))


class AsyncResponses:
    """OpenAI's Responses API."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def create(
        self, input: ResponseInput, *, extra_body: Extra = None, **options: Unpack[ResponseOptions]
    ) -> Response:
        """A response, in one piece."""
        return cast(Response, await self._caller.answer(RESPONSES.call(input, options, extra_body)))

    def stream(
        self, input: ResponseInput, *, extra_body: Extra = None, **options: Unpack[ResponseOptions]
    ) -> AsyncStream[ResponseEvent, Response]:
        """A response, as it is made."""
        return AsyncStream(self._caller, RESPONSES, RESPONSES.stream_call(input, options, extra_body))


class AsyncClient:
    """A streamserve server, for programs with asyncio. For one event loop; a context manager.

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
        http_client: httpx.AsyncClient | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        settings = Settings(url, api_key, timeouts)
        self._http = AsyncHttpTransport(settings, http_client)
        self._socket = AsyncSocketTransport(settings) if transport == "websocket" else None
        caller = self._caller = Caller(self._socket or self._http, retries, sleep, self._http.abandon)
        self.chat = AsyncChat(caller)
        self.completions = AsyncCompletions(caller)
        self.responses = AsyncResponses(caller)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def cancel(self, answer_id: str) -> None:
        """Ends an answer that is being made, from anywhere: its text so far stands, with the reason `abort`.

        Raises:
            NotFound: there is none with this id, or no more.
        """
        await self._http.delete(f"/v1/streams/{quote(answer_id, safe='')}")

    async def close(self) -> None:
        """Closes all connections, and so ends what is being made over them."""
        if self._socket is not None:
            await self._socket.close()
        await self._caller.close()
        await self._http.close()
