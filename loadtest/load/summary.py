"""What a run comes to."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.load.histogram import Histogram, mean, merge, percentile

TTFT, INTER_TOKEN, WHOLE = "TTFT", "inter-token", "whole answer"
# A client that is busier than this measures its own queue.
BUSY_CLIENT = 0.8


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution, in milliseconds; all 0 if `count` is."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, histogram: Histogram) -> Quantiles:
        """Of counts by value."""
        percents = (percentile(histogram, percent) for percent in (50, 95, 99))
        return cls(sum(histogram.values()), mean(histogram), *percents)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run.

    Attributes:
        duration_s: of the test.
        by_transport: name of a distribution (TTFT, inter-token, whole answer) and of a transport.
        ttft, inter_token: of all transports.
        tokens, requests, errors: how many; requests that failed are among the requests.
        client_cpu: processors that the client kept busy, the busiest process of several.
    """

    duration_s: float
    by_transport: Mapping[tuple[str, str], Quantiles]
    ttft: Quantiles
    inter_token: Quantiles
    tokens: int
    requests: int
    errors: int
    client_cpu: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests a second, from start to end."""
        return self.requests / self.duration_s if self.duration_s else 0.0

    @property
    def error_rate(self) -> float:
        """Share of the requests that failed."""
        return self.errors / self.requests if self.requests else 0.0


def summarise(
    histograms: Mapping[tuple[str, str], Histogram],
    *,
    duration_s: float,
    tokens: int,
    requests: int,
    errors: int,
    client_cpu: float,
) -> Summary:
    """Works a summary out; `histograms` are by name of the distribution and of the transport."""

    def overall(name: str) -> Quantiles:
        return Quantiles.of(merge(each for key, each in histograms.items() if key[0] == name))

    return Summary(
        duration_s=duration_s,
        by_transport={key: Quantiles.of(each) for key, each in histograms.items() if each},
        ttft=overall(TTFT),
        inter_token=overall(INTER_TOKEN),
        tokens=tokens,
        requests=requests,
        errors=errors,
        client_cpu=client_cpu,
    )


def table(summary: Summary) -> str:
    """A summary as text."""
    rows = [("ms", "", "p50", "p95", "p99", "mean", "count"), *_rows(summary)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    rule = "-" * len(lines[0])
    totals = [
        ("output tokens/s", f"{summary.tokens_per_s:,.1f}"),
        ("requests/s", f"{summary.requests_per_s:,.2f}"),
        ("errors", f"{summary.errors:,} of {summary.requests:,} ({100 * summary.error_rate:.2f} %)"),
        ("client", f"{summary.client_cpu:.2f} processors"),
    ]
    lines = [lines[0], rule, *lines[1:], rule, *(f"{name:<16} {value}" for name, value in totals)]
    if summary.client_cpu > BUSY_CLIENT:
        lines.append("The client was busy: its own queue is in these times. Use more of them (--processes).")
    return "\n".join(lines)


def _rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    for (name, transport), values in summary.by_transport.items():
        yield _row(name, transport, values)
    transports = {transport for _, transport in summary.by_transport}
    if len(transports) > 1:
        yield _row(TTFT, "all", summary.ttft)
        yield _row(INTER_TOKEN, "all", summary.inter_token)


def _row(name: str, transport: str, values: Quantiles) -> tuple[str, ...]:
    times = (f"{value:,.1f}" for value in (values.p50, values.p95, values.p99, values.mean))
    return (name, transport, *times, f"{values.count:,}")


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    words = [f"{cell:<{width}}" for cell, width in zip(row[:2], widths[:2], strict=True)]
    numbers = [f"{cell:>{width + 2}}" for cell, width in zip(row[2:], widths[2:], strict=True)]
    return " ".join(words) + "".join(numbers)


def write_csv(summary: Summary, path: Path) -> None:
    """Writes the figures of a summary, a row for each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["figure", "transport", "p50_ms", "p95_ms", "p99_ms", "mean_ms", "count", "per_second"]
        )
        every = {
            **summary.by_transport,
            (TTFT, "all"): summary.ttft,
            (INTER_TOKEN, "all"): summary.inter_token,
        }
        for (name, transport), values in every.items():
            times = [round(value, 3) for value in (values.p50, values.p95, values.p99, values.mean)]
            writer.writerow([name, transport, *times, values.count, ""])
        for name, count, rate in (
            ("output tokens", summary.tokens, summary.tokens_per_s),
            ("requests", summary.requests, summary.requests_per_s),
            ("errors", summary.errors, summary.errors / summary.duration_s if summary.duration_s else 0.0),
        ):
            writer.writerow([name, "all", "", "", "", "", count, round(rate, 3)])
