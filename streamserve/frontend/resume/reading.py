"""What a connection gets of a kept stream, whichever frontend runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from streamserve.frontend.api.problems import Problem


class Ending(NamedTuple):
    """How a stream ended.

    Attributes:
        number: of this event, which follows that of the last object.
        problem: what went wrong; None if all went well.
    """

    number: int
    problem: Problem | None


class Piece(NamedTuple):
    """Some events in a row.

    Attributes:
        first: number of the first of them.
        events: JSON objects.
        ending: nothing follows, and this is why; None if something may.
        is_known: the caller has had the ending already.
    """

    first: int
    events: list[bytes]
    ending: Ending | None = None
    is_known: bool = False


# Takes events at once, the first of them under a number; False if it wants no more for now.
Take = Callable[[int, list[bytes]], bool]


class Reading(Protocol):
    """One connection's place in a stream. Must be closed."""

    @property
    def stream_id(self) -> str:
        """The answer's id."""

    @property
    def names_events(self) -> bool:
        """As of the endpoint (streamserve.frontend.api.endpoint)."""

    async def read(self) -> Piece:
        """The next events, as soon as there are any; nothing after a piece with an ending.

        A piece without either says that what takes events (`divert`) has wanted no more.

        Raises:
            StreamTaken: a newer connection has the stream now.
            StreamserveError: the stream failed before its first event, or its frontend is gone.
        """

    def divert(self, take: Take, lose: Callable[[], None]) -> None:
        """From now on events may be handed to `take` while somebody waits in `read`.

        Args:
            lose: called when a newer connection takes the stream, also while nobody waits.
        """

    def cancel(self) -> None:
        """Ends the generation; the stream then comes to its end."""

    def close(self) -> None:
        """The connection is gone; the stream is kept for a while."""
