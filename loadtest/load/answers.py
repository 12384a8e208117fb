"""What a streamed answer said, and when, told as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Takes the measurements of one transport."""

    def first_token(self, milliseconds: float) -> None:
        """From sending the request to the first event with text."""

    def gap(self, milliseconds: float) -> None:
        """Between two events with text that follow one another. Hot."""

    def tokens(self, count: int) -> None:
        """Tokens that came. Hot."""


class Answer:
    """Reads the chunks of one answer.

    Each event with text is counted as one token at once; what the server's own count has more is added at the
    end.

    Args:
        sent: when the request was sent, in seconds.
        sink: told of the times.

    Attributes:
        problem: what is wrong with it; empty if nothing is.
        tokens: so far.
    """

    def __init__(self, sent: float, sink: Sink) -> None:
        self._sent = sent
        self._last = sent
        self._sink = sink
        self.problem = ""
        self.tokens = 0

    def chunk(self, now: float, chunk: dict[str, Any]) -> None:
        """Takes in a chunk that came at `now`. Hot: once for each event."""
        if error := chunk.get("error"):
            self.problem = f"the stream says: {error.get('message') if isinstance(error, dict) else error}"
            return
        for choice in chunk.get("choices") or ():
            if _has_text(choice["delta"]):
                if self.tokens:
                    self._sink.gap((now - self._last) * 1000.0)
                else:
                    self._sink.first_token((now - self._sent) * 1000.0)
                self._last = now
                self.tokens += 1
                self._sink.tokens(1)
        if usage := chunk.get("usage"):
            more = usage.get("completion_tokens", 0) - self.tokens
            if more > 0:
                self.tokens += more
                self._sink.tokens(more)

    def finish(self) -> None:
        """The stream ended well."""
        if not self.problem and not self.tokens:
            self.problem = "no text came"


def _has_text(delta: Mapping[str, Any]) -> bool:
    # Servers that part thoughts from the answer have one of two names for them. A user reads both.
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
