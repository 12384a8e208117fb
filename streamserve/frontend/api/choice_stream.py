"""The chunks of one choice as they come, and a way to write them that wakes no task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from streamserve.frontend.api.choice import Choice, Piece
from streamserve.frontend.api.chunks import Chunks
from streamserve.frontend.api.endpoint import Write
from streamserve.frontend.client import EngineClient
from streamserve.frontend.mailbox import Delta
from streamserve.frontend.registry import Meter

_NO_PIECE = Piece("")


class ChoiceStream:
    """The chunks of one choice.

    Args:
        choice: what comes in.
        chunks: makes them.
        meter: told of tokens and end.

    Attributes:
        generation: what the engine was asked.
        is_finished: the last chunk was made.
    """

    def __init__(self, choice: Choice, chunks: Chunks, meter: Meter) -> None:
        self.generation = choice.generation
        self.is_finished = False
        self._choice = choice
        self._assembler = choice.assembler
        self._chunks = chunks
        self._meter = meter
        self._observe = meter.observe
        self._is_plain = choice.is_plain
        self._has_begun = False
        self._details: dict[str, Any] = {}

    def accept(self, delta: Delta) -> list[bytes]:
        """The chunks that `delta` makes; there may be none. Hot: once for each delta."""
        self._observe(len(delta.tokens))
        batch = [] if self._has_begun else self._opening()
        end = _NO_PIECE
        if self._is_plain:
            text = self._assembler.accept(delta.tokens, delta.finish)
            if text:
                batch.append(self._chunks.text(text))
        else:
            shown, end = self._choice.accept(delta)
            if shown.text:
                batch.append(self._detailed(shown))
        reason = self._assembler.finish_reason
        if reason is not None:
            self._meter.finish(reason)
            self.is_finished = True
            batch.append(self._detailed(end, reason))
        return batch

    def fail(self) -> None:
        """An error has ended it."""
        self._meter.finish("error")

    def _opening(self) -> list[bytes]:
        """What comes before the text, once the engine has begun."""
        self._has_begun = True
        choice, chunks = self._choice, self._chunks
        if chunks.is_chat:
            return [chunks.role(choice.prompt_ids())]
        self._details = choice.prompt_ids()
        return [self._detailed(choice.echo())] if choice.telling.echoes else []

    def _detailed(self, piece: Piece, reason: str | None = None) -> bytes:
        details, self._details = self._details, {}
        if piece.token_ids is not None:
            details = {**details, "token_ids": piece.token_ids}
        if reason is not None:
            details = {**details, **self._choice.ending()}
        return self._chunks.detailed(piece.text, piece.logprobs, reason, details)


class Diversion:
    """Writes the chunks of one choice in the turn of the event loop in which its tokens come in.

    Args:
        client: the way to the engine.
        stream: the choice, whose generation runs.
        last: what comes after its last chunk.
        write: takes the chunks; False if it wants no more for now.
    """

    def __init__(
        self,
        client: EngineClient,
        stream: ChoiceStream,
        last: Callable[[], list[bytes]],
        write: Write,
    ) -> None:
        mailbox = stream.generation.mailbox
        assert mailbox is not None, "the generation does not run"
        self._client = client
        self._stream = stream
        self._last = last
        self._write = write
        self._mailbox = mailbox
        self._done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(self) -> bool:
        """Returns True at the end of the choice, False when `write` wants no more.

        Raises:
            StreamserveError: the generation failed.
        """
        self._mailbox.listener = self._listen
        try:
            # For what has come since somebody looked last.
            self._listen()
            return await self._done
        finally:
            self._mailbox.listener = None

    def _listen(self) -> None:
        """Hot: once for each delta."""
        try:
            delta = self._mailbox.take()
            if delta.finish:
                self._client.check(delta)
            stream = self._stream
            batch = stream.accept(delta)
            if stream.is_finished:
                self._write(batch + self._last())
                self._end(True)
            elif batch and not self._write(batch):
                self._end(False)
        # Nothing may come out into the pump, where it would be everybody's failure.
        except Exception as error:
            self._stream.fail()
            self._mailbox.listener = None
            if not self._done.done():
                self._done.set_exception(error)

    def _end(self, is_over: bool) -> None:
        self._mailbox.listener = None
        if not self._done.done():
            self._done.set_result(is_over)
