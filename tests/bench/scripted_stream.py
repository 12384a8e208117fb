"""A server that answers as a test says, under a clock that stands still until the test moves it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

WAIT_S = 60.0
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = "data: [DONE]\n\n"


class ScriptedClock:
    """Tells the time that a test has set, and when it was last asked."""

    def __init__(self) -> None:
        self.now = 100.0
        self._was_read = asyncio.Event()

    def __call__(self) -> float:
        self._was_read.set()
        return self.now

    async def at(self, moment: float, act: Callable[[], None]) -> None:
        """Sets the time, does what makes the client look at it, and waits until it has."""
        self.now = moment
        self._was_read.clear()
        act()
        async with asyncio.timeout(WAIT_S):
            await self._was_read.wait()


class ScriptedStream:
    """One request, and the stream that answers it."""

    def __init__(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.head = head
        self.body = body
        self.writer = writer

    def send(self, text: str, before: bytes = b"") -> None:
        data = text.encode()
        self.writer.write(before + b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, text: str = "") -> None:
        data = text.encode()
        last = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        self.writer.write(last + b"0\r\n\r\n")


def completion(text: str, **more: Any) -> str:
    return event({"choices": [{"index": 0, "text": text}], **more})


def event(chunk: Any) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def usage(prompt: int, completion: int) -> str:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


Answer = Callable[[ScriptedStream], Awaitable[None]]


@asynccontextmanager
async def scripted_server(answer: Answer) -> AsyncIterator[str]:
    """Serves on a free port; `answer` is run for each request. Gives the base URL."""

    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                await answer(ScriptedStream(head, body, writer))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*tasks)
        await server.wait_closed()
