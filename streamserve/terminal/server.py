"""An OpenAI-compatible server, seen from a terminal: streamed text, or one sentence about what is wrong."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any

import httpx

from streamserve.errors import RequestFailed
from streamserve.terminal.sse import Event, EventDecoder

CONNECT_TIMEOUT_S = 10.0
# A live server sends a comment every few seconds of silence; this long without a byte means that it is gone.
SILENCE_TIMEOUT_S = 600.0

_JSON = {"Content-Type": "application/json"}
_SURROGATES = re.compile("[\ud800-\udfff]")


class Server:
    """The server at `url`, with or without a trailing `/v1`; a context manager.

    Every method raises RequestFailed when the server cannot be reached, refuses, or breaks off.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        try:
            self._client = httpx.Client(timeout=timeout, trust_env=not _is_loopback(self._url))
        except (OSError, ValueError, httpx.InvalidURL) as error:
            # Proxies and certificates that the environment names.
            raise RequestFailed(f"cannot set up a connection: {error}") from error

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def first_model(self) -> str:
        """The name of the first model that the server lists."""
        with self._errors():
            response = self._client.get(f"{self._url}/v1/models")
            _check(response)
            try:
                return str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise RequestFailed(f"{self._url} lists no models; is it a streamserve?") from error

    def stream_chat(self, body: dict[str, Any]) -> Generator[str, None, None]:
        """The pieces of one answer, as they come."""
        with contextlib.closing(self._stream("/v1/chat/completions", body)) as choices:
            for choice in choices:
                if text := choice.get("delta", {}).get("content"):
                    yield text

    def stream_completion(self, body: dict[str, Any]) -> Generator[str, None, None]:
        """The pieces of one continuation, as they come."""
        with contextlib.closing(self._stream("/v1/completions", body)) as choices:
            for choice in choices:
                if text := choice.get("text"):
                    yield text

    def _stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        decoder = EventDecoder()
        with (
            self._errors(),
            self._client.stream(
                "POST", self._url + path, content=_encode(body | {"stream": True}), headers=_JSON
            ) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
            _check(response)
            for data in response.iter_bytes():
                for event in decoder.decode(data):
                    if event.data == "[DONE]":
                        return
                    yield from _chunk(event).get("choices") or []
        raise RequestFailed("the server broke off before the answer was complete")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise RequestFailed(f"cannot connect to {self._url}: is a server running there?") from error
        # httpx lets UnicodeError through where an address cannot be encoded.
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise RequestFailed(f"{self._url}: {error or type(error).__name__}") from error


def _encode(body: dict[str, Any]) -> bytes:
    # Surrogates are what Python makes of a command line's bytes that are no text, and what a model may write.
    return _SURROGATES.sub("\ufffd", json.dumps(body, ensure_ascii=False)).encode()


def _check(response: httpx.Response) -> None:
    if response.status_code != httpx.codes.OK:
        raise RequestFailed(f"the server answered {response.status_code}: {_message(response.text)}")


def _chunk(event: Event) -> dict[str, Any]:
    try:
        chunk = json.loads(event.data)
    except ValueError as error:
        raise RequestFailed(f"the server sent an event that is no JSON: {event.data[:80]!r}") from error
    if not isinstance(chunk, dict) or event.type == "error" or "error" in chunk:
        raise RequestFailed(f"the server reports: {_message(event.data)}")
    return chunk


def _message(body: str) -> str:
    """What an error body says to a person, whatever its shape."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body.strip()[:200] or "(nothing)"


def _is_loopback(url: str) -> bool:
    # A proxy that the environment names cannot reach this machine's own loopback addresses.
    try:
        host = httpx.URL(url).host
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except (ValueError, httpx.InvalidURL):
        return False
