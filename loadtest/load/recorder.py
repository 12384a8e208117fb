"""Measurements as locust's statistics, and back.

TTFT, inter-token times and tokens get rows of their own beside the whole answers. They are written to the
rows
directly, not as request events: an event for each token would cost more than reading it, and would make
    locust's total, which is of requests, one of everything. A token is logged without a time, so that the
    row's rate is tokens/s.
"""

from __future__ import annotations

from typing import Any

from locust import stats as locust_stats
from locust.stats import RequestStats

from loadtest.load.histogram import Histogram, bucket, merge
from loadtest.load.summary import INTER_TOKEN, TTFT, WHOLE, Summary, summarise
from loadtest.load.timeline import Counts

TOKENS = "output tokens"
TRANSPORTS = ("SSE", "WS")
_OWN = (TTFT, INTER_TOKEN, TOKENS)


def use_fine_buckets() -> None:
    """Has locust count times by three digits instead of whole milliseconds: a token takes a few of them."""
    locust_stats.bucket_response_time = bucket


class Recorder:
    """Takes the measurements of one transport (`loadtest.load.answers.Sink`).

    Args:
        environment: locust's.
        transport: name of the column that locust calls type.
    """

    def __init__(self, environment: Any, transport: str) -> None:
        self._environment = environment
        self._transport = transport

    def first_token(self, milliseconds: float) -> None:
        """From sending the request to the first event with text."""
        self._stats.get(TTFT, self._transport).log(milliseconds, 0)

    def gap(self, milliseconds: float) -> None:
        """Between two events with text that follow one another. Hot."""
        self._stats.get(INTER_TOKEN, self._transport).log(milliseconds, 0)

    def tokens(self, count: int) -> None:
        """Tokens that came. Hot."""
        entry = self._stats.get(TOKENS, self._transport)
        for _ in range(count):
            entry.log(None, 0)

    def request(self, kind: str, milliseconds: float, num_bytes: int, error: Exception | None) -> None:
        """A whole answer, or a failure, whose time says nothing: a request in locust's sense."""
        self._environment.events.request.fire(
            request_type=self._transport,
            name=kind,
            response_time=None if error else milliseconds,
            response_length=num_bytes,
            exception=error,
            context={},
        )

    @property
    def _stats(self) -> Any:
        # Looked up each time, for locust clears its rows when a test starts.
        return self._environment.stats


def counts(stats: RequestStats, at_s: float) -> Counts:
    """Everything so far, from the rows of this process or, at a master, of all."""
    return Counts(
        at_s=at_s,
        tokens=sum(_entry_count(stats, TOKENS, transport) for transport in TRANSPORTS),
        requests=stats.total.num_requests,
        errors=stats.total.num_failures,
        ttft=merge(_histogram(stats, TTFT, transport) for transport in TRANSPORTS),
        inter_token=merge(_histogram(stats, INTER_TOKEN, transport) for transport in TRANSPORTS),
    )


def summary_of(stats: RequestStats, duration_s: float, client_cpu: float) -> Summary:
    """The summary of the rows."""
    histograms: dict[tuple[str, str], Histogram] = {}
    for name in (TTFT, INTER_TOKEN):
        for transport in TRANSPORTS:
            histograms[name, transport] = _histogram(stats, name, transport)
    for transport in TRANSPORTS:
        whole = (key for key in stats.entries if key[1] == transport and key[0] not in _OWN)
        histograms[WHOLE, transport] = merge(stats.entries[key].response_times for key in whole)
    now = counts(stats, duration_s)
    return summarise(
        histograms,
        duration_s=duration_s,
        tokens=now.tokens,
        requests=now.requests,
        errors=now.errors,
        client_cpu=client_cpu,
    )


def _histogram(stats: RequestStats, name: str, transport: str) -> Histogram:
    # Asking for a row that is not there would make it.
    return dict(stats.entries[name, transport].response_times) if (name, transport) in stats.entries else {}


def _entry_count(stats: RequestStats, name: str, transport: str) -> int:
    key = (name, transport)
    return int(stats.entries[key].num_requests) if key in stats.entries else 0
