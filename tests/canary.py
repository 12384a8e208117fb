"""Somebody in the middle of an answer, whom nothing that others do may disturb."""

from __future__ import annotations

import threading
from types import TracebackType

import httpx
from server import PATIENCE_S, sse_events

BODY = {"model": "tiny", "prompt": "canary", "max_tokens": 20_000, "ignore_eos": True, "stream": True}


class Canary:
    """Reads one stream after the other while the context is open; flows on entry, and must still on exit.

    Args:
        url: of the server.

    Attributes:
        num_events: heard so far.
    """

    def __init__(self, url: str) -> None:
        self.num_events = 0
        self._url = url
        self._spoilt: list[str] = []
        self._has_heard = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Canary:
        self._thread.start()
        self.wait_more(3)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait_more(3)
        finally:
            self._stop.set()
            self._thread.join(PATIENCE_S)
        if error is None:
            assert self._spoilt == []

    def wait_more(self, count: int) -> None:
        """Waits until so many more events have come."""
        with self._has_heard:
            wanted = self.num_events + count
            flows = self._has_heard.wait_for(lambda: self._spoilt or self.num_events >= wanted, PATIENCE_S)
            assert self._spoilt == []
            assert flows, "the stream stands still"

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._read()
        except Exception as error:
            self._spoil(repr(error))

    def _read(self) -> None:
        event = ""
        with httpx.stream("POST", f"{self._url}/v1/completions", json=BODY, timeout=PATIENCE_S) as answer:
            for event in sse_events(answer):
                if '"error"' in event:
                    self._spoil(event)
                with self._has_heard:
                    self.num_events += 1
                    self._has_heard.notify_all()
                if self._stop.is_set():
                    return
        if event != "[DONE]":
            self._spoil(f"the stream ended with {event}")

    def _spoil(self, why: str) -> None:
        with self._has_heard:
            self._spoilt.append(why)
            self._has_heard.notify_all()
