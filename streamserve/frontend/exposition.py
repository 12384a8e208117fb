"""The metrics as text for Prometheus: names, labels and buckets as vLLM has them, and our own beside them.

The frontends' rows are read where they lie. The engine's numbers are those of a STATS frame (described in
streamserve.messages) that was asked for just now, so gauges are right on an idle server too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamserve.frontend.metrics import Family, Kind, Layout
from streamserve.frontend.pump import EngineFacts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NS_PER_S, MS_PER_S = 1e9, 1e3

Labels = Sequence[tuple[str, str]]
Gauges = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineNumbers:
    """What is known of the engine at the moment.

    Attributes:
        facts: what it said about itself.
        gauges: the body of its newest STATS frame.
    """

    facts: EngineFacts
    gauges: Gauges


def _share_used(gauges: Gauges) -> float:
    num_blocks: int = gauges["num_blocks"]
    used: int = num_blocks - gauges["free_blocks"]
    return used / num_blocks if num_blocks else 0.0


def _number(key: str) -> Callable[[Gauges], float]:
    return lambda gauges: float(gauges[key])


def _seconds(key: str) -> Callable[[Gauges], float]:
    return lambda gauges: float(gauges[key]) / NS_PER_S


_ENGINE: tuple[tuple[str, Kind, str, Callable[[Gauges], float]], ...] = (
    ("vllm:num_requests_running", Kind.GAUGE, "Requests in the running batch.", _number("running")),
    ("vllm:num_requests_waiting", Kind.GAUGE, "Requests waiting for a place in it.", _number("waiting")),
    ("vllm:kv_cache_usage_perc", Kind.GAUGE, "Share of KV cache blocks in use, 0 to 1.", _share_used),
    ("vllm:prefix_cache_queries", Kind.COUNTER, "Prompt tokens looked up.", _number("prefix_queries")),
    ("vllm:prefix_cache_hits", Kind.COUNTER, "Prompt tokens found.", _number("prefix_hits")),
    ("vllm:num_preemptions", Kind.COUNTER, "Requests that had to give way.", _number("preemptions")),
    ("streamserve:engine_steps", Kind.COUNTER, "Steps of the engine.", _number("steps")),
)
# Host time of all steps, and of the last one, by what it was spent on.
_PHASES = ("schedule", "execute", "settle")


@dataclass(frozen=True, slots=True)
class _Told:
    """How a STATS frame tells a histogram: counts up to each bound, of all, and a sum, in its own units."""

    prefix: str
    count: str
    sum: str
    per_unit: float = 1.0
    per_sum: float = 1.0


class Text:
    """Prometheus' text format, a family at a time."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def begin(self, name: str, kind: Kind, help: str) -> None:
        """The head of a family."""
        shown = f"{name}_total" if kind is Kind.COUNTER else name
        self._lines += [f"# HELP {shown} {help}", f"# TYPE {shown} {kind.value}"]

    def sample(self, name: str, labels: Labels, value: float) -> None:
        """One line."""
        inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels)
        self._lines.append(f"{name}{{{inside}}} {float(value)!r}" if inside else f"{name} {float(value)!r}")

    def histogram(self, name: str, labels: Labels, bounds: Sequence[float], cells: Sequence[float]) -> None:
        """The lines of one histogram; `cells` are the counts of each bucket by itself, then the sum."""
        total = 0.0
        for bound, count in zip((*bounds, None), cells, strict=False):
            total += count
            le = "+Inf" if bound is None else repr(bound)
            self.sample(f"{name}_bucket", [*labels, ("le", le)], total)
        self.sample(f"{name}_sum", labels, cells[-1])
        self.sample(f"{name}_count", labels, total)

    def encode(self) -> bytes:
        """All of it."""
        return ("\n".join(self._lines) + "\n").encode()


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Exposition:
    """Shows the whole server.

    Args:
        layout: of the rows.
        memory: the rows of all frontends.
        model_name: the name in the API.
    """

    def __init__(self, layout: Layout, memory: memoryview, model_name: str) -> None:
        self._layout = layout
        size = layout.row_bytes
        self._rows = [memory[at : at + size].cast("d") for at in range(0, len(memory), size)]
        self._base = (("model_name", model_name), ("engine", "0"))

    def render(self, engine: EngineNumbers | None, num_restarts: int) -> bytes:
        """The text.

        Args:
            engine: None while there is none; its families are left out then.
            num_restarts: of the engine, so far.
        """
        text = Text()
        for family in self._layout.families:
            self._show(text, family)
        text.begin("streamserve:engine_up", Kind.GAUGE, "Whether an engine serves.")
        text.sample("streamserve:engine_up", (), engine is not None)
        text.begin("streamserve:engine_restarts", Kind.COUNTER, "How often the engine was started again.")
        text.sample("streamserve:engine_restarts_total", (), num_restarts)
        if engine is not None:
            self._show_engine(text, engine)
        return text.encode()

    def _show(self, text: Text, family: Family) -> None:
        text.begin(family.name, family.kind, family.help)
        base = self._base if family.name.startswith("vllm:") else ()
        for values in family.series:
            labels = [*base, *zip(family.labels, values, strict=True)]
            at = self._layout.place(family.name, values)
            rows = [list(map(float, row[at : at + family.width])) for row in self._rows]
            if family.by_frontend:
                for index, cells in enumerate(rows):
                    self._show_series(text, family, [*labels, ("frontend", str(index))], cells)
            else:
                cells = [sum(column, 0.0) for column in zip(*rows, strict=True)]
                # Of hundreds of combinations of handler, method and status most never come up.
                if any(cells) or not family.name.startswith("http_"):
                    self._show_series(text, family, labels, cells)

    @staticmethod
    def _show_series(text: Text, family: Family, labels: Labels, cells: list[float]) -> None:
        if family.kind is Kind.HISTOGRAM:
            text.histogram(family.name, labels, family.buckets, cells)
        else:
            suffix = "_total" if family.kind is Kind.COUNTER else ""
            text.sample(f"{family.name}{suffix}", labels, cells[0])

    def _show_engine(self, text: Text, engine: EngineNumbers) -> None:
        for name, kind, meaning, value in _ENGINE:
            text.begin(name, kind, meaning)
            suffix = "_total" if kind is Kind.COUNTER else ""
            text.sample(f"{name}{suffix}", self._base, value(engine.gauges))
        self._show_histogram(
            text,
            "vllm:iteration_tokens_total",
            "Tokens that ran in a step of the engine.",
            engine.gauges,
            _Told("step_tokens_le_", "steps", "step_tokens"),
        )
        self._show_histogram(
            text,
            "vllm:request_queue_time_seconds",
            "From acceptance until a request began to run.",
            engine.gauges,
            _Told("queue_ms_le_", "begun", "queue_ns", per_unit=MS_PER_S, per_sum=NS_PER_S),
        )
        self._show_host_time(text, engine.gauges)
        name = "vllm:cache_config_info"
        text.begin(name, Kind.GAUGE, "What the KV cache is made of.")
        text.sample(name, [*self._base, *_cache_labels(engine.facts)], 1)

    def _show_histogram(self, text: Text, name: str, help: str, gauges: Gauges, told: _Told) -> None:
        text.begin(name, Kind.HISTOGRAM, help)
        bounds = sorted(int(key.removeprefix(told.prefix)) for key in gauges if key.startswith(told.prefix))
        counts = [gauges[f"{told.prefix}{bound}"] for bound in bounds] + [gauges[told.count]]
        apart = [count - before for before, count in zip([0, *counts], counts, strict=False)]
        shown = [bound / told.per_unit for bound in bounds]
        text.histogram(name, self._base, shown, [*apart, gauges[told.sum] / told.per_sum])

    def _show_host_time(self, text: Text, gauges: Gauges) -> None:
        total, last = "streamserve:engine_host_seconds", "streamserve:engine_last_step_seconds"
        text.begin(total, Kind.COUNTER, "Host time of all steps by what it was spent on.")
        for phase in _PHASES:
            text.sample(f"{total}_total", [("phase", phase)], gauges[f"{phase}_ns"] / NS_PER_S)
        text.begin(last, Kind.GAUGE, "The same of the last step.")
        for phase in _PHASES:
            text.sample(last, [("phase", phase)], gauges[f"last_{phase}_ns"] / NS_PER_S)


def _cache_labels(facts: EngineFacts) -> Iterator[tuple[str, str]]:
    yield "block_size", str(facts.block_size)
    yield "num_gpu_blocks", str(facts.num_blocks)
    yield "kv_cache_size_tokens", str(facts.kv_capacity_tokens)
    yield "enable_prefix_caching", str(facts.enable_prefix_caching)
