"""What the dashboard shows: the whole server in a few numbers, most of them of the last seconds.

Gauges are as they are. What only counts up becomes a rate or a quantile by its difference to a reading from
some seconds ago, so readings of half a minute are kept while somebody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamserve.frontend.exposition import NS_PER_S, EngineNumbers
from streamserve.frontend.families import METHODS, REJECTIONS, RINGS, Family
from streamserve.frontend.paths import HANDLERS
from streamserve.frontend.processes import ProcessFiles, server_processes
from streamserve.frontend.quantiles import quantile
from streamserve.frontend.rows import Rows

# Rates are over the shorter time; quantiles, hits and errors, which are rarer, over the longer one.
RATE_WINDOW_S = 3.0
LONG_WINDOW_S = 30.0
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_FIRST_TOKEN, _BETWEEN_TOKENS = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_GENERATED, _PROMPT = "vllm:generation_tokens", "vllm:prompt_tokens"
_PARTS = ("schedule_ns", "execute_ns", "settle_ns")

Snapshot = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """What counts up, at one moment.

    Attributes:
        at_s: monotonic seconds.
        engine: the engine's numbers; None without one.
        epoch: which start of the engine they are of.
        counters: of all frontends together, by name.
        histograms: their counts, a bucket each.
        cpu_s: processor time of each process, by its name and id.
    """

    at_s: float
    engine: Mapping[str, Any] | None
    epoch: int
    counters: Mapping[str, float]
    histograms: Mapping[str, Sequence[float]]
    cpu_s: Mapping[tuple[str, int], float]


class Snapshots:
    """Makes them, one after the other.

    Args:
        rows: of all frontends.
        supervisor: process id of the supervisor; None for a frontend that runs by itself.
        process_files: says what processes use.
    """

    def __init__(
        self, rows: Rows, supervisor: int | None = None, process_files: ProcessFiles | None = None
    ) -> None:
        self._rows = rows
        self._supervisor = supervisor
        self._process_files = process_files or ProcessFiles()
        self._families: dict[str, Family] = {family.name: family for family in rows.layout.families}
        self._readings: deque[Reading] = deque()

    def take(self, now_s: float, engine: EngineNumbers | None, num_restarts: int) -> Snapshot:
        """The server as it is now.

        Args:
            now_s: monotonic seconds.
            engine: None while there is none; what is of it is null then.
            num_restarts: of the engine, so far.

        Returns:
            Names to numbers, null for what nothing is known of (streamserve.frontend.api.dashboard_replies).
        """
        processes, cpu_s = self._processes(engine)
        now = Reading(
            now_s,
            None if engine is None else engine.gauges,
            0 if engine is None else engine.facts.epoch,
            self._counters(),
            {name: self._rows.sums(name)[:-1] for name in (_FIRST_TOKEN, _BETWEEN_TOKENS)},
            cpu_s,
        )
        if self._readings and now_s - self._readings[-1].at_s > LONG_WINDOW_S:
            # Nobody has looked for so long: what was then is no measure of now.
            self._readings.clear()
        recent, longer = self._before(now_s - RATE_WINDOW_S), self._before(now_s - LONG_WINDOW_S)
        self._keep(now)
        for (name, pid), used_s in cpu_s.items():
            processes[name]["cpu"] = _cpu(recent, now, (name, pid), used_s)
        return {
            "at": now_s,
            "engine": {"up": int(engine is not None), "restarts": num_restarts},
            "requests": {
                "running": _gauge(now, "running"),
                "waiting": _gauge(now, "waiting"),
                "open": sum(self._rows.sums("streamserve:streams_open")),
            },
            "tokens_per_s": {
                "generated": _rate(recent, now, _GENERATED),
                "prompt": _rate(recent, now, _PROMPT),
            },
            "first_token_s": self._quantiles(longer, now, _FIRST_TOKEN),
            "between_tokens_s": self._quantiles(longer, now, _BETWEEN_TOKENS),
            "cache": {"used": _share_used(now), "hits": _hits(longer, now)},
            "steps": _steps(recent, now),
            "rings": {ring: self._fill(ring) for ring in RINGS},
            "errors": {name: _growth(longer, now, name) for name in ("failed", "rejected", "http_5xx")},
            "processes": processes,
        }

    def _before(self, at_s: float) -> Reading | None:
        """The newest reading of that time or before, else the oldest one; None if there is none."""
        found = next((each for each in reversed(self._readings) if each.at_s <= at_s), None)
        return found or (self._readings[0] if self._readings else None)

    def _keep(self, now: Reading) -> None:
        """Of what is too old, one reading stays, to compare with."""
        self._readings.append(now)
        while len(self._readings) > 1 and self._readings[1].at_s <= now.at_s - LONG_WINDOW_S:
            self._readings.popleft()

    def _counters(self) -> dict[str, float]:
        rows = self._rows
        rejected = [sum(rows.sums("vllm:admission_rejections", (reason,))) for reason in REJECTIONS]
        broken = [
            sum(rows.sums("http_requests", (handler, method, "5xx")))
            for handler in HANDLERS
            for method in METHODS
        ]
        return {
            _GENERATED: sum(rows.sums(_GENERATED)),
            _PROMPT: sum(rows.sums(_PROMPT)),
            "failed": sum(rows.sums("vllm:request_success", ("error",))),
            "rejected": sum(rejected),
            "http_5xx": sum(broken),
        }

    def _quantiles(self, before: Reading | None, now: Reading, name: str) -> dict[str, float | None]:
        counts = now.histograms[name]
        if before is None:
            return dict.fromkeys(QUANTILES)
        new = [count - old for count, old in zip(counts, before.histograms[name], strict=True)]
        bounds = self._families[name].buckets
        return {key: quantile(bounds, new, share) for key, share in QUANTILES.items()}

    def _fill(self, ring: str) -> float:
        """How full the fullest of all frontends' is, 0 to 1."""
        return max(self._fills(ring), default=0.0)

    def _fills(self, ring: str) -> list[float]:
        used = self._rows.each("streamserve:ring_used_bytes", (ring,))
        capacity = self._rows.each("streamserve:ring_capacity_bytes", (ring,))
        return [some / most if most else 0.0 for (some,), (most,) in zip(used, capacity, strict=True)]

    def _processes(
        self, engine: EngineNumbers | None
    ) -> tuple[dict[str, dict[str, float | None]], dict[tuple[str, int], float]]:
        """What each process uses, and its processor time so far."""
        pids = self._rows.pids()
        processes: dict[str, dict[str, float | None]] = {}
        cpu_s: dict[tuple[str, int], float] = {}
        for name, pid in server_processes(
            self._supervisor, None if engine is None else engine.facts.pid, pids
        ):
            usage = self._process_files.usage(pid)
            if usage is not None:
                cpu_s[name, pid] = usage[0]
                processes[name] = {"pid": pid, "cpu": None, "memory_bytes": usage[1]}
        streams = self._rows.each("streamserve:streams_open")
        lags = self._rows.each("streamserve:event_loop_lag_last_seconds")
        for index in range(len(pids)):
            if (numbers := processes.get(f"frontend-{index}")) is not None:
                numbers["streams"] = streams[index][0]
                numbers["loop_lag_s"] = lags[index][0]
                numbers |= {f"{ring}_ring": self._fills(ring)[index] for ring in RINGS}
        return processes, cpu_s


def _gauge(now: Reading, name: str) -> int | None:
    return None if now.engine is None else int(now.engine[name])


def _growth(before: Reading | None, now: Reading, name: str) -> float:
    return 0.0 if before is None else max(0.0, now.counters[name] - before.counters[name])


def _rate(before: Reading | None, now: Reading, name: str) -> float | None:
    if before is None or now.at_s <= before.at_s:
        return None
    return _growth(before, now, name) / (now.at_s - before.at_s)


def _cpu(before: Reading | None, now: Reading, process: tuple[str, int], used_s: float) -> float | None:
    """Processors that it kept busy since then."""
    if before is None or process not in before.cpu_s or now.at_s <= before.at_s:
        return None
    return max(0.0, used_s - before.cpu_s[process]) / (now.at_s - before.at_s)


def _share_used(now: Reading) -> float | None:
    """Of the KV cache's blocks."""
    if now.engine is None or not now.engine["num_blocks"]:
        return None
    return 1.0 - float(now.engine["free_blocks"]) / float(now.engine["num_blocks"])


def _engine_growth(before: Reading | None, now: Reading, name: str) -> float:
    """Of a counter of the same engine; 0 if it has been started since, or has no such counter."""
    if before is None or before.engine is None or now.engine is None or before.epoch != now.epoch:
        return 0.0
    return float(now.engine.get(name, 0) - before.engine.get(name, 0))


def _hits(before: Reading | None, now: Reading) -> float | None:
    """Share of the prompt tokens looked up since then that the prefix cache had."""
    num_queries = _engine_growth(before, now, "prefix_queries")
    return _engine_growth(before, now, "prefix_hits") / num_queries if num_queries > 0 else None


def _steps(before: Reading | None, now: Reading) -> dict[str, float | None]:
    """How many there were, and what one of them took in the mean."""
    num_steps = _engine_growth(before, now, "steps")
    per_s = None
    if before is not None and now.at_s > before.at_s and now.engine is not None:
        per_s = num_steps / (now.at_s - before.at_s)
    if num_steps <= 0:
        return {"per_s": per_s, **dict.fromkeys(("tokens", "host_s", "model_s", "device_idle_s"))}
    schedule_s, model_s, settle_s = (
        _engine_growth(before, now, part) / NS_PER_S / num_steps for part in _PARTS
    )
    num_gaps = _engine_growth(before, now, "device_gaps")
    idle_s = _engine_growth(before, now, "device_gap_ns") / NS_PER_S
    return {
        "per_s": per_s,
        "tokens": _engine_growth(before, now, "step_tokens") / num_steps,
        "host_s": schedule_s + settle_s,
        "model_s": model_s,
        "device_idle_s": idle_s / num_gaps if num_gaps > 0 else None,
    }
