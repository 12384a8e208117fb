"""The chunks of one choice."""

from __future__ import annotations

from typing import Any

from streamserve.frontend.api.choice import Choice
from streamserve.frontend.api.chunks import Chunks
from streamserve.frontend.api.telling import Piece
from streamserve.frontend.mailbox import Delta
from streamserve.frontend.registry import Meter


class ChoiceStream:
    """The chunks of one choice.

    Args:
        choice: what comes in.
        chunks: makes them.
        meter: told of tokens and end.

    Attributes:
        choice: see above.
        is_over: the last chunk was made.
    """

    def __init__(self, choice: Choice, chunks: Chunks, meter: Meter) -> None:
        self.choice = choice
        self.is_over = False
        choice.meter = meter
        self._assembler = choice.assembler
        self._chunks = chunks
        self._observe = meter.observe
        self._is_plain = choice.is_plain
        self._has_begun = False
        self._details: dict[str, Any] = {}

    async def begin(self) -> list[bytes]:
        """What comes before the text, once the engine has begun; nothing the second time."""
        if self._has_begun:
            return []
        self._has_begun = True
        choice, chunks = self.choice, self._chunks
        if chunks.is_chat:
            return [chunks.role(choice.prompt.ids())]
        self._details = choice.prompt.ids()
        return [self._detailed(await choice.echo())] if choice.telling.echoes else []

    def accept(self, delta: Delta) -> list[bytes]:
        """The chunks that `delta` makes; there may be none. Nothing is held back but by the choice itself.

        Hot: once for each delta.
        """
        if self._is_plain and not delta.finish:
            self._observe(len(delta.tokens))
            text = self._assembler.accept(delta.tokens, 0)
            if self._assembler.finish_reason is None:
                return [self._chunks.text(text)] if text else []
            self.choice.hold(text)
        else:
            self.choice.absorb(delta)
        return self.show()

    def show(self) -> list[bytes]:
        """The chunks of what has been absorbed since the last time: of all, unless the choice `has_more`."""
        choice = self.choice
        shown, end = choice.show()
        batch = []
        if shown.text or shown.logprobs is not None:
            batch.append(self._chunks.text(shown.text) if self._is_plain else self._detailed(shown))
        if choice.has_ended and not choice.has_more and not self.is_over:
            self.is_over = True
            batch.append(self._detailed(end, self._assembler.finish_reason))
        return batch

    def fail(self) -> None:
        """An error has ended it."""
        assert self.choice.meter is not None, "nobody counts"
        self.choice.meter.finish("error")

    def _detailed(self, piece: Piece, reason: str | None = None) -> bytes:
        details, self._details = self._details, {}
        if piece.token_ids is not None:
            details = {**details, "token_ids": piece.token_ids}
        if reason is not None:
            details = {**details, **self.choice.ending()}
        return self._chunks.detailed(piece.text, piece.logprobs, reason, details)
