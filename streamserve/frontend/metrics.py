"""Counters, gauges and histograms of the frontends, in memory that they share.

Each frontend writes its own row of 64-bit floats and reads everybody's, so whichever of them is asked shows
the whole server. What a cell of the row means is fixed when the server starts (`Layout`): an observation is
an addition at a known place, with no lock, no lookup by name and no object that grows.

    segment   row of frontend 0 │ row of frontend 1 │ …       one writer a row, any number of readers
    row       series │ series │ …                             in the order of the families
    series    counter, gauge: 1 cell │ histogram: a cell a bucket, one for what is above all, then the sum
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from streamserve.frontend.paths import HANDLERS

# One writer a cache line.
ROW_ALIGNMENT = 64
CELL_BYTES = 8

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
EXCHANGE_S = (0.1, 0.5, 1.0)
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SOCKET_S = (0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("max_waiting", "max_queue_time")
METHODS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD", "other")
STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx")
RINGS = ("request", "delta")


class Kind(Enum):
    """What a family counts, under the name that Prometheus has for it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its series.

    Attributes:
        name: without the `_total` of counters.
        kind: how it is written and shown.
        help: one sentence.
        labels: names of the labels that tell its series apart.
        series: the values of the labels, one tuple a series.
        buckets: upper bounds, rising (histograms only).
        by_frontend: shown for each frontend by itself; the others are summed.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)
    buckets: tuple[float, ...] = ()
    by_frontend: bool = False

    @property
    def width(self) -> int:
        """Cells of a series."""
        return len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1


def _single(*values: str) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


def _requests() -> list[Family]:
    def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Family:
        return Family(name, Kind.HISTOGRAM, help, buckets=buckets)

    return [
        Family("vllm:prompt_tokens", Kind.COUNTER, "Prompt tokens of requests that got a first token."),
        Family("vllm:prompt_tokens_cached", Kind.COUNTER, "Those of them that were in the prefix cache."),
        Family("vllm:generation_tokens", Kind.COUNTER, "Tokens generated and handed on."),
        Family(
            "vllm:request_success",
            Kind.COUNTER,
            "Finished requests by the reason for their end.",
            ("finished_reason",),
            _single(*FINISH_REASONS),
        ),
        Family(
            "vllm:admission_rejections",
            Kind.COUNTER,
            "Requests that were turned away unserved, by the limit that they hit.",
            ("reason",),
            _single(*REJECTIONS),
        ),
        histogram("vllm:time_to_first_token_seconds", "From acceptance to the first token.", FIRST_TOKEN_S),
        histogram("vllm:inter_token_latency_seconds", "Between two tokens of a stream.", BETWEEN_TOKENS_S),
        histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between two tokens of a finished request.",
            BETWEEN_TOKENS_S,
        ),
        histogram("vllm:e2e_request_latency_seconds", "From acceptance to the end.", REQUEST_S),
        histogram("vllm:request_decode_time_seconds", "From the first token to the last.", REQUEST_S),
        histogram("vllm:request_prompt_tokens", "Prompt tokens of finished requests.", TOKENS),
        histogram("vllm:request_generation_tokens", "Tokens generated for finished requests.", TOKENS),
        histogram("vllm:request_max_num_generation_tokens", "Tokens of a request's longest choice.", TOKENS),
        histogram("vllm:request_params_max_tokens", "The max_tokens of finished requests.", TOKENS),
        histogram("vllm:request_params_n", "Choices that requests asked for.", CHOICES),
    ]


def _transport() -> list[Family]:
    by_handler = tuple((handler, method) for handler in HANDLERS for method in METHODS)
    return [
        Family(
            "http_requests",
            Kind.COUNTER,
            "HTTP requests; probes and /metrics itself are not counted.",
            ("handler", "method", "status"),
            tuple((*pair, status) for pair in by_handler for status in STATUSES),
        ),
        Family(
            "http_request_duration_seconds",
            Kind.HISTOGRAM,
            "From the end of the head of a request to the end of its answer.",
            ("handler", "method"),
            by_handler,
            EXCHANGE_S,
        ),
        Family("vllm:websocket_connections_active", Kind.GAUGE, "Open WebSocket connections."),
        Family("vllm:websocket_connections", Kind.COUNTER, "WebSocket connections opened so far."),
        Family(
            "vllm:websocket_connection_duration_seconds",
            Kind.HISTOGRAM,
            "How long closed WebSocket connections were open.",
            buckets=SOCKET_S,
        ),
    ]


def _by_key(key_names: Sequence[str]) -> list[Family]:
    def counter(name: str, help: str) -> Family:
        return Family(f"streamserve:key_{name}", Kind.COUNTER, help, ("key",), _single(*key_names))

    return [
        counter("requests", "Finished requests by the name of the API key."),
        counter("prompt_tokens", "Prompt tokens by the name of the API key."),
        counter("generation_tokens", "Generated tokens by the name of the API key."),
    ]


def _by_frontend() -> list[Family]:
    def gauge(name: str, help: str, label: str | None = None, values: tuple[str, ...] = ()) -> Family:
        labels, series = ((label,), _single(*values)) if label else ((), ((),))
        return Family(f"streamserve:{name}", Kind.GAUGE, help, labels, series, by_frontend=True)

    return [
        gauge("streams_open", "Answers that somebody is waiting for."),
        gauge("requests_unstarted", "Requests between acceptance and first token."),
        Family(
            "streamserve:event_loop_lag_seconds",
            Kind.HISTOGRAM,
            "How late the event loop runs.",
            buckets=LAG_S,
            by_frontend=True,
        ),
        gauge("event_loop_lag_last_seconds", "How late it was when last looked at."),
        gauge("ring_used_bytes", "Bytes in a ring that its reader has not taken out yet.", "ring", RINGS),
        gauge("ring_capacity_bytes", "Bytes that a ring holds at most.", "ring", RINGS),
    ]


class Layout:
    """Which cells of a row belong to which series; the same in every process of a server.

    Args:
        key_names: names of the API keys, "" for requests without one.
    """

    def __init__(self, key_names: Sequence[str] = ("",)) -> None:
        self.key_names = tuple(dict.fromkeys(key_names))
        self.families = (*_requests(), *_transport(), *_by_key(self.key_names), *_by_frontend())
        self._places: dict[tuple[str, tuple[str, ...]], int] = {}
        cells = 0
        for family in self.families:
            for labels in family.series:
                self._places[family.name, labels] = cells
                cells += family.width
        self.row_bytes = -(-cells * CELL_BYTES // ROW_ALIGNMENT) * ROW_ALIGNMENT

    def place(self, name: str, labels: tuple[str, ...] = ()) -> int:
        """The first cell of a series."""
        return self._places[name, labels]

    def segment_bytes(self, num_frontends: int) -> int:
        """Bytes for all rows."""
        return self.row_bytes * num_frontends


class Counter:
    """One cell that is added to; a gauge is one that is also set."""

    __slots__ = ("_at", "_cells")

    def __init__(self, cells: memoryview[float], at: int) -> None:
        self._cells = cells
        self._at = at

    def add(self, amount: float = 1.0) -> None:
        """Hot: adds in place."""
        self._cells[self._at] += amount

    def set(self, value: float) -> None:
        """Puts `value` there (gauges only)."""
        self._cells[self._at] = value

    @property
    def value(self) -> float:
        """What is there."""
        return self._cells[self._at]


class Histogram:
    """The cells of one histogram."""

    __slots__ = ("_at", "_bounds", "_cells", "_sum_at")

    def __init__(self, cells: memoryview[float], at: int, bounds: tuple[float, ...]) -> None:
        self._cells = cells
        self._at = at
        self._bounds = bounds
        self._sum_at = at + len(bounds) + 1

    def observe(self, value: float, count: int = 1) -> None:
        """Takes note of `count` observations of `value`. Hot: a search among a few bounds, two additions."""
        cells = self._cells
        cells[self._at + bisect_left(self._bounds, value)] += count
        cells[self._sum_at] += value * count


class Row:
    """The row of one frontend: finds the cells of a series by its name.

    Args:
        layout: what is where.
        memory: `layout.row_bytes` bytes, writable.
    """

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        self.layout = layout
        self.cells = memory.cast("d")
        self._families = {family.name: family for family in layout.families}

    def counter(self, name: str, *labels: str) -> Counter:
        """The cell of a counter or gauge."""
        return Counter(self.cells, self.layout.place(name, labels))

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The cells of a histogram."""
        return Histogram(self.cells, self.layout.place(name, labels), self._families[name].buckets)

    def reset_gauges(self) -> None:
        """A new process starts with gauges of its own; its predecessor's counters it goes on with."""
        for family in self.layout.families:
            if family.kind is Kind.GAUGE:
                for labels in family.series:
                    self.cells[self.layout.place(family.name, labels)] = 0.0


@dataclass(frozen=True, slots=True)
class KeyCounters:
    """The counters of one API key's name."""

    requests: Counter
    prompt_tokens: Counter
    generation_tokens: Counter


class Metrics:
    """What a frontend counts about requests. The cells themselves are in `row`.

    Args:
        row: this frontend's; None counts for nobody but this object.
    """

    def __init__(self, row: Row | None = None) -> None:
        if row is None:
            layout = Layout()
            row = Row(layout, memoryview(bytearray(layout.row_bytes)))
        self.row = row
        self.prompt_tokens = row.counter("vllm:prompt_tokens")
        self.cached_tokens = row.counter("vllm:prompt_tokens_cached")
        self.generation_tokens = row.counter("vllm:generation_tokens")
        self.finished = {reason: row.counter("vllm:request_success", reason) for reason in FINISH_REASONS}
        self.rejected = {reason: row.counter("vllm:admission_rejections", reason) for reason in REJECTIONS}
        self.streams_open = row.counter("streamserve:streams_open")
        self.latency = Latencies(row)
        self.sizes = Sizes(row)
        self.sockets = Sockets(row)
        self._keys = {name: _key_counters(row, name) for name in row.layout.key_names}
        nowhere = Counter(memoryview(bytearray(CELL_BYTES)).cast("d"), 0)
        self._strangers = KeyCounters(nowhere, nowhere, nowhere)

    def of_key(self, name: str) -> KeyCounters:
        """The counters of an API key's name; shown nowhere if the layout does not know it."""
        return self._keys.get(name, self._strangers)


class Latencies:
    """The histograms of times, in seconds."""

    def __init__(self, row: Row) -> None:
        self.first_token = row.histogram("vllm:time_to_first_token_seconds")
        self.between_tokens = row.histogram("vllm:inter_token_latency_seconds")
        self.per_token = row.histogram("vllm:request_time_per_output_token_seconds")
        self.whole = row.histogram("vllm:e2e_request_latency_seconds")
        self.decode = row.histogram("vllm:request_decode_time_seconds")


class Sizes:
    """The histograms of numbers of tokens and choices."""

    def __init__(self, row: Row) -> None:
        self.prompt = row.histogram("vllm:request_prompt_tokens")
        self.generated = row.histogram("vllm:request_generation_tokens")
        self.longest = row.histogram("vllm:request_max_num_generation_tokens")
        self.max_tokens = row.histogram("vllm:request_params_max_tokens")
        self.choices = row.histogram("vllm:request_params_n")


class Sockets:
    """What is counted of WebSocket connections."""

    def __init__(self, row: Row) -> None:
        self.active = row.counter("vllm:websocket_connections_active")
        self.opened = row.counter("vllm:websocket_connections")
        self.duration = row.histogram("vllm:websocket_connection_duration_seconds")


def _key_counters(row: Row, name: str) -> KeyCounters:
    return KeyCounters(
        row.counter("streamserve:key_requests", name),
        row.counter("streamserve:key_prompt_tokens", name),
        row.counter("streamserve:key_generation_tokens", name),
    )
