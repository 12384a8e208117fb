"""What a streamed answer said, and when: the definitions that all figures rest on.

They are those of `vllm bench serve`: every chunk with a choice counts as a token's, the first one ends the
TTFT, each later one makes an inter-token time, and the latency ends with the last. A stream that reports an
error, or breaks off, is a failed request here even if it had begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from streamserve.terminal.sse import EventDecoder

Clock = Callable[[], float]


@dataclass(slots=True)
class Outcome:
    """One request as the client saw it. Times are in seconds of the run's clock.

    Attributes:
        prompt_len: tokens of the prompt, by the server's count where it says one.
        start_time: when it was sent.
        queue_time: how long it waited for its turn under a limit of concurrency before.
        ttft: from sending it to the first chunk.
        itl: between chunks that follow one another.
        latency: from sending it to the last chunk.
        output_tokens: by the server's count; the number of chunks if it says none.
        text: the answer.
        error: what went wrong; empty if nothing did.
    """

    prompt_len: int
    start_time: float = 0.0
    queue_time: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def is_success(self) -> bool:
        """The whole answer came."""
        return not self.error

    @property
    def tpot(self) -> float:
        """Mean seconds of each token after the first; 0 if there is none."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class StreamTimer:
    """Reads an event stream into an outcome, as it comes.

    Args:
        outcome: to fill; its `start_time` is set.
    """

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._decoder = EventDecoder()
        self._num_chunks = 0
        self._last = outcome.start_time
        self._pieces: list[str] = []
        self._is_done = False

    def feed(self, now: float, data: bytes) -> None:
        """Takes in what came at `now`. Hot: once for each piece of the body."""
        for event in self._decoder.decode(data):
            if event.data == "[DONE]":
                self._is_done = True
            else:
                self._chunk(now, event.data)

    def _chunk(self, now: float, data: str) -> None:
        try:
            chunk = orjson.loads(data)
            if chunk.get("error"):
                self._outcome.error = f"the stream reports: {error_message(chunk)}"
                return
            if choices := chunk.get("choices"):
                self._token(now, choices[0])
            if usage := chunk.get("usage"):
                self._outcome.output_tokens = usage.get("completion_tokens") or 0
                self._outcome.prompt_len = usage.get("prompt_tokens") or self._outcome.prompt_len
        except (ValueError, AttributeError, LookupError, TypeError):
            self._outcome.error = f"the stream has an event that is no chunk: {data[:80]!r}"

    def _token(self, now: float, choice: dict[str, Any]) -> None:
        outcome = self._outcome
        if self._num_chunks:
            outcome.itl.append(now - self._last)
        else:
            outcome.ttft = now - outcome.start_time
        self._num_chunks += 1
        self._last = now
        text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        self._pieces.append(text or "")

    def finish(self) -> None:
        """The body has ended."""
        outcome = self._outcome
        outcome.text = "".join(self._pieces)
        outcome.latency = self._last - outcome.start_time
        outcome.output_tokens = outcome.output_tokens or self._num_chunks
        if not outcome.error and not self._num_chunks:
            outcome.error = "the stream has no chunk with a choice"
        if not outcome.error and not self._is_done:
            outcome.error = "the stream broke off before [DONE]"


def error_message(body: dict[str, Any]) -> str:
    """What an error object says to a person, whatever its shape."""
    error = body.get("error")
    return str(error.get("message", error) if isinstance(error, dict) else error)
