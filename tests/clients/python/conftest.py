"""Both clients behind one interface, so that each test is one for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from streamserve_client import AsyncClient, Client, Retries

URL = "http://server.example"
Handler = Callable[[httpx.Request], httpx.Response]


@dataclass
class Reading:
    """What a stream gave, and what it says of itself afterwards."""

    chunks: list[Any] = field(default_factory=list)
    text: str = ""
    result: Any = None


class Blocking:
    """The blocking client, in a thread."""

    def __init__(self, url: str, handler: Handler | None = None, **settings: Any) -> None:
        self.delays: list[float] = []
        self._http = httpx.Client(transport=httpx.MockTransport(handler)) if handler else None
        self._client = Client(url, http_client=self._http, sleep=self.delays.append, **settings)

    async def create(self, endpoint: str, prompt: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self._client, endpoint).create, prompt, **options)

    async def read(self, endpoint: str, prompt: Any, limit: int | None = None, **options: Any) -> Reading:
        return await asyncio.to_thread(self._read, endpoint, prompt, limit, options)

    def _read(self, endpoint: str, prompt: Any, limit: int | None, options: dict[str, Any]) -> Reading:
        reading = Reading()
        with getattr(self._client, endpoint).stream(prompt, **options) as stream:
            for chunk in stream:
                reading.chunks.append(chunk)
                if len(reading.chunks) == limit:
                    break
        reading.text, reading.result = stream.text, stream.result()
        return reading

    async def cancel(self, answer_id: str) -> None:
        await asyncio.to_thread(self._client.cancel, answer_id)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)
        if self._http is not None:
            self._http.close()


class Asynchronous:
    """The asyncio client."""

    def __init__(self, url: str, handler: Handler | None = None, **settings: Any) -> None:
        self.delays: list[float] = []
        self._http = httpx.AsyncClient(transport=httpx.MockTransport(handler)) if handler else None
        self._client = AsyncClient(url, http_client=self._http, sleep=self._sleep, **settings)

    async def _sleep(self, seconds: float) -> None:
        self.delays.append(seconds)

    async def create(self, endpoint: str, prompt: Any, **options: Any) -> Any:
        return await getattr(self._client, endpoint).create(prompt, **options)

    async def read(self, endpoint: str, prompt: Any, limit: int | None = None, **options: Any) -> Reading:
        reading = Reading()
        async with getattr(self._client, endpoint).stream(prompt, **options) as stream:
            async for chunk in stream:
                reading.chunks.append(chunk)
                if len(reading.chunks) == limit:
                    break
        reading.text, reading.result = stream.text, await stream.result()
        return reading

    async def cancel(self, answer_id: str) -> None:
        await self._client.cancel(answer_id)

    async def close(self) -> None:
        await self._client.close()
        if self._http is not None:
            await self._http.aclose()


@pytest.fixture(params=[Blocking, Asynchronous])
async def make_client(request: pytest.FixtureRequest) -> Any:
    """Makes clients of one kind or the other: `make_client(handler, url=…, **settings)`."""
    made: list[Any] = []

    def make(handler: Handler | None = None, url: str = URL, **settings: Any) -> Any:
        settings = {"retries": Retries(chance=lambda: 1.0), **settings}
        made.append(request.param(url, handler, **settings))
        return made[-1]

    yield make
    for client in made:
        await client.close()
