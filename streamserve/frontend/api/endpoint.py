"""What a transport (HTTP with SSE, WebSocket) and a generation endpoint say to each other.

A transport reads a body and hands it over as a `Call`; the endpoint checks it and gives back an `Answer`.
Nothing has run yet then: whatever is wrong with the request is raised before the engine sees it. The
transport either asks for the answer in one piece or iterates its chunks, which are the same JSON objects on
every transport.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

TENANT = "streamserve.tenant"


@dataclass(frozen=True, slots=True)
class Call:
    """One request, free of how it came.

    Attributes:
        body: the JSON object.
        num_bytes: its size on the wire.
        request_id: the part of the answer's id after its prefix; the caller's X-Request-Id or a random one.
        tenant: name of the API key that was used, "" where the server has none.
    """

    body: dict[str, Any]
    num_bytes: int
    request_id: str
    tenant: str = ""


class Answer(Protocol):
    """A checked request. Exactly one of `whole` and `batches` is used, once."""

    @property
    def id(self) -> str:
        """The id in the answer, with its prefix."""

    @property
    def is_stream(self) -> bool:
        """Whether the caller asked for chunks."""

    @property
    def asks_resume(self) -> bool:
        """Whether the body asks for a stream that outlives its connection."""

    def cancel(self) -> None:
        """Ends it at once, at whatever stage it is; what has come so far stands."""

    async def whole(self) -> bytes:
        """The answer as one JSON document.

        Raises:
            StreamserveError: the request failed.
        """

    def batches(self) -> AsyncGenerator[list[bytes], None]:
        """The answer as JSON objects; each list is what came at once. The end of the iteration is success.

        Nothing is yielded before the engine's first output. The caller must close the iterator.

        Raises:
            StreamserveError: the request failed.
        """


# Takes a batch at once; False if it wants no more for now.
Write = Callable[[list[bytes]], bool]
Divert = Callable[[Write], Awaitable[bool]]


@runtime_checkable
class Divertible(Protocol):
    """An answer that can hand out its chunks without waking a task for each batch.

    Attributes:
        is_divertible: whether this one can.
    """

    is_divertible: bool

    async def divert(self, write: Write) -> bool:
        """Goes on from where an iteration of `batches` has just yielded, until the end or until told to wait.

        Each batch is handed to `write` in the turn of the event loop in which it came in. Only when this has
        returned may `batches` be closed; it must not be iterated any more.

        Returns:
            True at the end; False if `write` wants no more for now. What comes then is merged, until this is
            called again.

        Raises:
            StreamserveError: the request failed.
        """


class Endpoint(Protocol):
    """One kind of generation: chat completions, completions, responses.

    Attributes:
        names_events: the objects of a stream have a `type`, by which an event stream names its events; such a
            stream says itself when it is over or has failed, so neither `[DONE]` nor an error follows.
    """

    names_events: bool

    async def accept(self, call: Call) -> Answer:
        """Checks and prepares a request.

        Raises:
            StreamserveError: it cannot be served.
        """


def tenant_of(scope: MutableMapping[str, Any]) -> str:
    """The name of the API key of a request, as the authentication put it into the ASGI scope."""
    tenant: str = scope.get(TENANT, "")
    return tenant
