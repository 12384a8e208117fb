"""Server-sent events, the reading side: bytes in, events out."""

from __future__ import annotations

import codecs
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its type (`message` unless the server named one) and its data, lines joined by newlines."""

    type: str
    data: str


class EventDecoder:
    """Turns the bytes of an event stream into events, however they were cut.

    Follows the WHATWG rules: lines end in LF, CRLF or CR, a line that begins with a colon is a comment, an
    event without data is none, and one that the end of the stream cuts off is dropped.
    """

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._line: list[str] = []
        self._data: list[str] = []
        self._type = ""
        self._ended_in_cr = False

    def decode(self, data: bytes) -> list[Event]:
        """The events that `data` completes."""
        events = []
        for line in self._split(self._text.decode(data)):
            if line:
                self._field(line)
            elif event := self._dispatch():
                events.append(event)
        return events

    def _split(self, text: str) -> list[str]:
        # The LF of a CRLF that was cut in two belongs to the line which the CR has already ended.
        if self._ended_in_cr and text:
            text = text.removeprefix("\n")
            self._ended_in_cr = False
        if text.endswith("\r"):
            self._ended_in_cr = True
        first, *more = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._line.append(first)
        if not more:
            return []
        lines = ["".join(self._line), *more[:-1]]
        self._line = [more[-1]]
        return lines

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._type = value

    def _dispatch(self) -> Event | None:
        event = Event(self._type or "message", "\n".join(self._data)) if self._data else None
        self._data, self._type = [], ""
        return event
