"""How far a stream is, and what its failure means at that point."""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar, cast

from streamserve_client.accumulators import Accumulator
from streamserve_client.errors import ClientError, ConnectionFailed, StreamInterrupted
from streamserve_client.place import Place

Chunk = TypeVar("Chunk")
Answer = TypeVar("Answer")


class Progress(Generic[Chunk, Answer]):
    """One stream, over all its tries.

    Args:
        accumulator: takes its chunks.
    """

    def __init__(self, accumulator: Accumulator[Chunk, Answer]) -> None:
        self._accumulator = accumulator

    @property
    def is_complete(self) -> bool:
        """The end has come."""
        return self._accumulator.is_complete

    @property
    def has_begun(self) -> bool:
        """Something has come."""
        return self._accumulator.has_begun

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self._accumulator.text

    def text_of(self, chunk: Chunk) -> str:
        """What a chunk adds to it."""
        return self._accumulator.text_of(chunk)

    def take(self, event: dict[str, Any]) -> Chunk:
        """The next object of the stream as a chunk. Hot: once a chunk.

        Raises:
            APIError: it tells of the stream's failure.
            InvalidAnswer: it is no chunk.
        """
        return self._accumulator.add(event)

    def end(self) -> None:
        """The transport says that the stream is over."""
        self._accumulator.end()

    def check_end(self) -> None:
        """No more comes.

        Raises:
            ConnectionFailed: the end is missing.
        """
        if not self.is_complete:
            raise ConnectionFailed("the connection ended before the answer did")

    def fail(self, error: ClientError, place: Place) -> NoReturn:
        """Raises what `error`, after which there is no other try, means to the caller."""
        is_lost = isinstance(error, ConnectionFailed) or not place.is_attached
        if self.has_begun and is_lost:
            partial = cast(dict[str, Any], self.answer())
            raise StreamInterrupted(str(error), self.text, partial) from error
        raise error

    def answer(self) -> Answer:
        """What has come, in the form of a whole answer.

        Raises:
            ClientError: nothing has.
        """
        if not self._accumulator.has_begun:
            raise ClientError("nothing of the answer has come")
        return self._accumulator.answer()
