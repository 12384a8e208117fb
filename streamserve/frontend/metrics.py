"""Counters, gauges and histograms of the frontends, in memory that they share.

Each frontend writes its own row of 64-bit floats and reads everybody's, so whichever of them is asked shows
the whole server. What a cell of the row means is fixed when the server starts (`Layout`): an observation is
an addition at a known place, with no lock, no lookup by name and no object that grows.

    segment   row of frontend 0 │ row of frontend 1 │ …       one writer a row, any number of readers
    row       process id │ series │ series │ …                in the order of the families
    series    counter, gauge: 1 cell │ histogram: a cell a bucket, one for what is above all, then the sum
              │ summary: a histogram without buckets
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from streamserve.frontend.families import FINISH_REASONS, REJECTIONS, Kind, families

# One writer a cache line.
ROW_ALIGNMENT = 64
CELL_BYTES = 8
# The id of the process that writes a row; 0 where there is none yet.
PID_CELL = 0


class Layout:
    """Which cells of a row belong to which series; the same in every process of a server.

    Args:
        key_names: names of the API keys, "" for requests without one.
    """

    def __init__(self, key_names: Sequence[str] = ("",)) -> None:
        self.key_names = tuple(dict.fromkeys(key_names))
        self.families = families(self.key_names)
        self._places: dict[tuple[str, tuple[str, ...]], int] = {}
        cells = PID_CELL + 1
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
    """The cells of one histogram or summary."""

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
        """The cells of a histogram or summary."""
        return Histogram(self.cells, self.layout.place(name, labels), self._families[name].buckets)

    def take_over(self, pid: int) -> None:
        """A new process starts with gauges of its own; its predecessor's counters it goes on with."""
        self.cells[PID_CELL] = pid
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
        self.computed_by_source = row.counter("vllm:prompt_tokens_by_source", "local_compute")
        self.found_by_source = row.counter("vllm:prompt_tokens_by_source", "local_cache_hit")
        self.cached_on_device = row.counter("vllm:prompt_tokens_cached_by_source", "device")
        self.generation_tokens = row.counter("vllm:generation_tokens")
        self.finished = {reason: row.counter("vllm:request_success", reason) for reason in FINISH_REASONS}
        self.rejected = {reason: row.counter("vllm:admission_rejections", reason) for reason in REJECTIONS}
        self.streams_open = row.counter("streamserve:streams_open")
        self.latency = Latencies(row)
        self.sizes = Sizes(row)
        self.sockets = Sockets(row)
        self.resume = Resume(row)
        self.recovery = Recovery(row)
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
        self.queue = row.histogram("vllm:request_queue_time_seconds")
        self.prefill = row.histogram("vllm:request_prefill_time_seconds")
        self.decode = row.histogram("vllm:request_decode_time_seconds")
        self.inference = row.histogram("vllm:request_inference_time_seconds")


class Sizes:
    """The histograms of numbers of tokens and choices."""

    def __init__(self, row: Row) -> None:
        self.prompt = row.histogram("vllm:request_prompt_tokens")
        self.computed = row.histogram("vllm:request_prefill_kv_computed_tokens")
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


class Resume:
    """What is counted of streams that outlive their connections."""

    def __init__(self, row: Row) -> None:
        self.detached = row.counter("streamserve:streams_detached")
        self.num_bytes = row.counter("streamserve:resume_buffer_bytes")
        self.resumed = row.counter("streamserve:streams_resumed")
        self.expired = row.counter("streamserve:streams_expired")
        self.refused = row.counter("streamserve:streams_not_kept")


class Recovery:
    """What is counted of requests whose engine has died."""

    def __init__(self, row: Row) -> None:
        self.continued = row.counter("streamserve:requests_continued")
        self.suspected = row.counter("streamserve:requests_suspected")
        self.poisonous = row.counter("streamserve:requests_poisonous")
        self.outage = row.histogram("streamserve:engine_outage_seconds")


def _key_counters(row: Row, name: str) -> KeyCounters:
    return KeyCounters(
        row.counter("streamserve:key_requests", name),
        row.counter("streamserve:key_prompt_tokens", name),
        row.counter("streamserve:key_generation_tokens", name),
    )
