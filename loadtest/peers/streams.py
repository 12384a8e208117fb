"""What a streamed completion said, and when: read from the pieces that came, after they all have come."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from loadtest.peers.connection import Exchange

_END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it. Times are in seconds from a moment common to the answers of a run.

    Attributes:
        sent: when the request was sent.
        times: when each event with text came, the first token first.
        prompt_tokens: as the server counted them; 0 if it did not say.
        output_tokens: as the server counted them; 0 if it did not say.
        problem: what is wrong with it; empty if nothing is.
    """

    sent: float
    times: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    problem: str

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Answer:
        """What `to_json` was made from."""
        return cls(**{**data, "times": tuple(data["times"])})

    @property
    def ttft(self) -> float:
        """Seconds from the request to its first token."""
        return self.times[0] - self.sent

    def gaps(self) -> Iterator[float]:
        """Seconds between events with text that follow one another."""
        return (later - earlier for earlier, later in pairwise(self.times))


def events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """When the last byte of each server-sent event came, and its data; comments are left out."""
    body = b"".join(piece for _, piece in pieces)
    ends = list(accumulate(len(piece) for _, piece in pieces))
    begin = 0
    for found in _END_OF_EVENT.finditer(body):
        lines = body[begin : found.end()].decode(errors="replace").splitlines()
        begin = found.end()
        data = [line.removeprefix("data:").removeprefix(" ") for line in lines if line.startswith("data:")]
        if data:
            yield pieces[bisect_left(ends, begin)][0], "\n".join(data)


def read_answer(exchange: Exchange, origin: float, max_tokens: int | None) -> Answer:
    """Reads one answer.

    Args:
        exchange: what came.
        origin: the moment from which times are told.
        max_tokens: how many tokens there must be; None for an answer that was cut off.
    """
    times: list[float] = []
    usage: dict[str, int] = {}
    problem = exchange.problem
    if exchange.status == 200:
        for moment, data in events(exchange.pieces):
            if data == "[DONE]":
                continue
            event = json.loads(data)
            usage = event.get("usage") or usage
            problem = problem or _error(event)
            if any(choice.get("text") for choice in event.get("choices", ())):
                times.append(moment - origin)
    elif not problem:
        body = b"".join(piece for _, piece in exchange.pieces)
        problem = f"HTTP {exchange.status}: {body[:200].decode(errors='replace')}"
    output_tokens = int(usage.get("completion_tokens", 0))
    if not problem and max_tokens is not None and output_tokens != max_tokens:
        problem = f"{output_tokens} tokens instead of {max_tokens}" if usage else "no usage"
    if not problem and not times:
        problem = "no text"
    return Answer(
        exchange.sent - origin, tuple(times), int(usage.get("prompt_tokens", 0)), output_tokens, problem
    )


def _error(event: dict[str, Any]) -> str:
    return f"the stream said: {event['error']}" if event.get("error") else ""
