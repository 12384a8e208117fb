"""The metrics as text for Prometheus: names, labels and buckets as vLLM has them, and our own beside them.

The frontends' rows are read where they lie. The engine's numbers are those of a STATS frame (described in
streamserve.messages) that was asked for just now, so gauges are right on an idle server too. What processes
use is read from /proc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamserve.frontend.families import Family, Kind
from streamserve.frontend.metrics import Layout
from streamserve.frontend.processes import FAMILIES as PROCESS_FAMILIES
from streamserve.frontend.processes import ProcessFiles, server_processes
from streamserve.frontend.pump import EngineFacts
from streamserve.frontend.rows import Rows

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NS_PER_S = 1e9

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


def _constant(value: float) -> Callable[[Gauges], float]:
    return lambda _gauges: float(value)


def _seconds(key: str) -> Callable[[Gauges], float]:
    return lambda gauges: float(gauges[key]) / NS_PER_S


@dataclass(frozen=True, slots=True)
class _Shown:
    """One metric of the engine.

    Attributes:
        name, kind, help, labels: as of a `Family`.
        series: values of the labels, and how each number is had from a STATS frame.
        needs: a number of the frame; without it the metric is left out. None shows it always.
    """

    name: str
    kind: Kind
    help: str
    series: tuple[tuple[tuple[str, ...], Callable[[Gauges], float]], ...]
    labels: tuple[str, ...] = ()
    needs: str | None = None


def _single(name: str, kind: Kind, help: str, value: Callable[[Gauges], float]) -> _Shown:
    return _Shown(name, kind, help, (((), value),))


# Host time of all steps, and of the last one, by what it was spent on.
_PHASES = ("schedule", "execute", "settle")
_HAS_GRAPHS = "graph_fallbacks"
_MEMORY_PARTS = ("total", "budget", "weights", "buffers", "activations", "graphs", "other", "cache")
_ENGINE = (
    _single("vllm:num_requests_running", Kind.GAUGE, "Requests in the running batch.", _number("running")),
    _single(
        "vllm:num_requests_waiting", Kind.GAUGE, "Requests waiting for a place in it.", _number("waiting")
    ),
    _Shown(
        "vllm:num_requests_waiting_by_reason",
        Kind.GAUGE,
        "The same requests by what they wait for; none is put off for other reasons than capacity.",
        ((("capacity",), _number("waiting")), (("deferred",), _constant(0))),
        ("reason",),
    ),
    _single("vllm:kv_cache_usage_perc", Kind.GAUGE, "Share of KV cache blocks in use, 0 to 1.", _share_used),
    _single("vllm:prefix_cache_queries", Kind.COUNTER, "Prompt tokens looked up.", _number("prefix_queries")),
    _single("vllm:prefix_cache_hits", Kind.COUNTER, "Prompt tokens found.", _number("prefix_hits")),
    _single("vllm:num_preemptions", Kind.COUNTER, "Requests that had to give way.", _number("preemptions")),
    _Shown(
        "vllm:engine_sleep_state",
        Kind.GAUGE,
        "1 for the state of the engine: it is awake as long as it is there.",
        tuple(
            ((state,), _constant(state == "awake")) for state in ("awake", "weights_offloaded", "discard_all")
        ),
        ("sleep_state",),
    ),
    _single("streamserve:engine_steps", Kind.COUNTER, "Steps of the engine.", _number("steps")),
    _Shown(
        "streamserve:engine_host_seconds",
        Kind.COUNTER,
        "Host time of all steps by what it was spent on.",
        tuple(((phase,), _seconds(f"{phase}_ns")) for phase in _PHASES),
        ("phase",),
    ),
    _Shown(
        "streamserve:engine_last_step_seconds",
        Kind.GAUGE,
        "The same of the last step.",
        tuple(((phase,), _seconds(f"last_{phase}_ns")) for phase in _PHASES),
        ("phase",),
    ),
    _Shown(
        "streamserve:graph_steps",
        Kind.COUNTER,
        "Steps by how their forward ran: from one CUDA graph, from pieces, or eagerly.",
        tuple(((mode,), _number(f"graph_steps_{mode.lower()}")) for mode in ("FULL", "PIECEWISE", "NONE")),
        ("mode",),
        needs=_HAS_GRAPHS,
    ),
    _Shown(
        "streamserve:graph_padded_tokens",
        Kind.COUNTER,
        "Rows that were run for nothing, since graphs have fixed sizes.",
        (((), _number("graph_padded_tokens")),),
        needs=_HAS_GRAPHS,
    ),
    _Shown(
        "streamserve:graph_fallbacks",
        Kind.COUNTER,
        "Steps that ran eagerly although their kind has graphs: too large, or not captured yet.",
        (((), _number("graph_fallbacks")),),
        needs=_HAS_GRAPHS,
    ),
    _Shown(
        "streamserve:graphs",
        Kind.GAUGE,
        "CUDA graphs that are there, and that are still to be captured.",
        tuple(((state,), _number(f"graphs_{state}")) for state in ("captured", "waiting")),
        ("state",),
        needs=_HAS_GRAPHS,
    ),
    _Shown(
        "streamserve:graphs_bytes",
        Kind.GAUGE,
        "Memory of the GPU that the captured graphs take.",
        (((), _number("graphs_bytes")),),
        needs=_HAS_GRAPHS,
    ),
    _Shown(
        "streamserve:device_gap_seconds",
        Kind.COUNTER,
        "Time between steps in which the GPU waited for the host, over the pairs of steps that overlap.",
        (((), _seconds("device_gap_ns")),),
        needs="device_gaps",
    ),
    _Shown(
        "streamserve:device_gaps",
        Kind.COUNTER,
        "Those pairs.",
        (((), _number("device_gaps")),),
        needs="device_gaps",
    ),
    _Shown(
        "streamserve:gpu_memory_bytes",
        Kind.GAUGE,
        "Where the GPU's memory goes, as measured at the start; graphs as they were estimated.",
        tuple(((part,), _number(f"gpu_memory_{part}")) for part in _MEMORY_PARTS),
        ("part",),
        needs="gpu_memory_total",
    ),
)
_STEP_TOKENS = "step_tokens_le_"


class Text:
    """Prometheus' text format, a family at a time."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def begin(self, name: str, kind: Kind, help: str) -> None:
        """The head of a family."""
        shown = f"{name}_total" if kind is Kind.COUNTER else name
        self._lines += [f"# HELP {shown} {help}", f"# TYPE {shown} {kind.value}"]

    def sample(self, name: str, kind: Kind, labels: Labels, value: float) -> None:
        """The line of a counter or gauge."""
        self._line(f"{name}_total" if kind is Kind.COUNTER else name, labels, value)

    def _line(self, name: str, labels: Labels, value: float) -> None:
        inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels)
        self._lines.append(f"{name}{{{inside}}} {float(value)!r}" if inside else f"{name} {float(value)!r}")

    def histogram(self, name: str, labels: Labels, bounds: Sequence[float], cells: Sequence[float]) -> None:
        """The lines of one histogram; `cells` are the counts of each bucket by itself, then the sum."""
        total = 0.0
        for bound, count in zip((*bounds, None), cells, strict=False):
            total += count
            le = "+Inf" if bound is None else repr(bound)
            self._line(f"{name}_bucket", [*labels, ("le", le)], total)
        self.summary(name, labels, total, cells[-1])

    def summary(self, name: str, labels: Labels, count: float, total: float) -> None:
        """The lines of one summary."""
        self._line(f"{name}_sum", labels, total)
        self._line(f"{name}_count", labels, count)

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
        supervisor: process id of the supervisor; None for a frontend that runs by itself.
    """

    def __init__(
        self, layout: Layout, memory: memoryview, model_name: str, supervisor: int | None = None
    ) -> None:
        self._layout = layout
        self._rows = Rows(layout, memory)
        self._base = (("model_name", model_name), ("engine", "0"))
        self._supervisor = supervisor
        self._process_files = ProcessFiles()

    def render(self, engine: EngineNumbers | None, num_restarts: int) -> bytes:
        """The text.

        Args:
            engine: None while there is none; its families are left out then.
            num_restarts: of the engine, so far.
        """
        text = Text()
        for family in self._layout.families:
            self._show(text, family)
        name = "streamserve:engine_up"
        text.begin(name, Kind.GAUGE, "Whether an engine serves.")
        text.sample(name, Kind.GAUGE, (), engine is not None)
        name = "streamserve:engine_restarts"
        text.begin(name, Kind.COUNTER, "How often the engine was started again.")
        text.sample(name, Kind.COUNTER, (), num_restarts)
        if engine is not None:
            self._show_engine(text, engine)
        self._show_processes(text, engine)
        return text.encode()

    def _show(self, text: Text, family: Family) -> None:
        text.begin(family.name, family.kind, family.help)
        base = self._base if family.name.startswith("vllm:") else ()
        for values in family.series:
            labels = [*base, *zip(family.labels, values, strict=True)]
            if family.by_frontend:
                for index, cells in enumerate(self._rows.each(family.name, values)):
                    self._show_series(text, family, [*labels, ("frontend", str(index))], cells)
            else:
                cells = self._rows.sums(family.name, values)
                # Of hundreds of combinations of handler, method and status most never come up.
                if any(cells) or not family.name.startswith("http_"):
                    self._show_series(text, family, labels, cells)

    @staticmethod
    def _show_series(text: Text, family: Family, labels: Labels, cells: list[float]) -> None:
        if family.kind is Kind.HISTOGRAM:
            text.histogram(family.name, labels, family.buckets, cells)
        elif family.kind is Kind.SUMMARY:
            text.summary(family.name, labels, *cells)
        else:
            text.sample(family.name, family.kind, labels, cells[0])

    def _show_engine(self, text: Text, engine: EngineNumbers) -> None:
        for shown in _ENGINE:
            if shown.needs is not None and shown.needs not in engine.gauges:
                continue
            text.begin(shown.name, shown.kind, shown.help)
            for values, number in shown.series:
                labels = [*self._base, *zip(shown.labels, values, strict=True)]
                text.sample(shown.name, shown.kind, labels, number(engine.gauges))
        self._show_step_tokens(text, engine.gauges)
        name = "vllm:cache_config_info"
        text.begin(name, Kind.GAUGE, "What the KV cache is made of.")
        text.sample(name, Kind.GAUGE, [*self._base, *_cache_labels(engine.facts)], 1)

    def _show_step_tokens(self, text: Text, gauges: Gauges) -> None:
        """A STATS frame counts up to each bound; the cells of a histogram are those between two."""
        bounds = sorted(int(key.removeprefix(_STEP_TOKENS)) for key in gauges if key.startswith(_STEP_TOKENS))
        counts = [gauges[f"{_STEP_TOKENS}{bound}"] for bound in bounds] + [gauges["steps"]]
        apart = [count - before for before, count in zip([0, *counts], counts, strict=False)]
        name = "vllm:iteration_tokens_total"
        text.begin(name, Kind.HISTOGRAM, "Tokens that ran in a step of the engine.")
        text.histogram(name, self._base, [float(bound) for bound in bounds], [*apart, gauges["step_tokens"]])

    def _show_processes(self, text: Text, engine: EngineNumbers | None) -> None:
        """Each process by itself; sums over the label are those of the whole server."""
        engine_pid = None if engine is None else engine.facts.pid
        processes = server_processes(self._supervisor, engine_pid, self._rows.pids())
        numbers = [(process, self._process_files.read(pid)) for process, pid in processes]
        for family in PROCESS_FAMILIES:
            known = [(process, values[family.name]) for process, values in numbers if family.name in values]
            if known:
                text.begin(family.name, family.kind, family.help)
            for process, value in known:
                text.sample(family.name, family.kind, [("process", process)], value)


def _cache_labels(facts: EngineFacts) -> Iterator[tuple[str, str]]:
    yield "block_size", str(facts.block_size)
    yield "num_gpu_blocks", str(facts.num_blocks)
    yield "kv_cache_size_tokens", str(facts.kv_capacity_tokens)
    yield "enable_prefix_caching", str(facts.enable_prefix_caching)
