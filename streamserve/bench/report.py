"""What is shown and kept of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from streamserve.bench.metrics import Distribution, Metrics
from streamserve.bench.names import METRICS
from streamserve.bench.options import Options
from streamserve.bench.timing import Outcome
from streamserve.errors import ConfigError

_WIDTH = 50
# Without --save-detailed these are left out: they grow with the requests.
_DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")


@dataclass(frozen=True, slots=True)
class Result:
    """A run that is over.

    Attributes:
        model, tokenizer: their names.
        outcomes: of all requests, in their order.
        duration_s: from the first request to the last answer.
        metrics: what follows from them.
        when: the end.
    """

    model: str
    tokenizer: str
    outcomes: Sequence[Outcome]
    duration_s: float
    metrics: Metrics
    when: datetime


def described(options: Options, metrics: Metrics) -> Iterator[tuple[str, Distribution]]:
    """The distributions that are asked for, by name."""
    raw = options.raw
    for name in METRICS:
        # Only a limit makes requests wait in the client, and only a schedule says since when.
        applies = not name.endswith(("queue", "queue_time")) or raw.max_concurrency is not None
        applies &= name != "e2el_including_client_queue" or not math.isinf(raw.request_rate)
        if name in options.percentile_metrics and applies:
            yield name, getattr(metrics, name)


def table(options: Options, result: Result) -> str:
    """The figures as text."""
    metrics, raw = result.metrics, options.raw
    rows: list[tuple[str, float | int]] = [
        ("Successful requests:", metrics.completed),
        ("Failed requests:", metrics.failed),
    ]
    if raw.max_concurrency is not None:
        rows.append(("Maximum request concurrency:", raw.max_concurrency))
    if not math.isinf(raw.request_rate):
        rows.append(("Request rate configured (RPS):", raw.request_rate))
    rows += [
        ("Benchmark duration (s):", result.duration_s),
        ("Total input tokens:", metrics.total_input),
        ("Total generated tokens:", metrics.total_output),
        ("Request throughput (req/s):", metrics.request_throughput),
    ]
    if options.goodput:
        rows.append(("Request goodput (req/s):", metrics.request_goodput))
    rows += [
        ("Output token throughput (tok/s):", metrics.output_throughput),
        ("Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s),
        ("Peak concurrent requests:", metrics.max_concurrent_requests),
        ("Total token throughput (tok/s):", metrics.total_token_throughput),
    ]
    lines = [" Serving Benchmark Result ".center(_WIDTH, "="), *(_row(*row) for row in rows)]
    for name, values in described(options, metrics):
        short, heading = METRICS[name]
        lines.append(heading.center(_WIDTH, "-"))
        lines += [_row(f"Mean {short} (ms):", values.mean), _row(f"Median {short} (ms):", values.median)]
        lines += [
            _row(f"P{_percent(percent)} {short} (ms):", value)
            for percent, value in values.percentiles.items()
        ]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _row(name: str, value: float) -> str:
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"


def _percent(percent: float) -> str:
    return str(int(percent)) if percent == int(percent) else str(percent)


def as_json(options: Options, result: Result) -> dict[str, Any]:
    """The figures as they are kept."""
    raw, metrics = options.raw, result.metrics
    data: dict[str, Any] = {
        "date": result.when.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": raw.backend,
        "backend": raw.backend,
        "label": raw.label,
        "model_id": result.model,
        "tokenizer_id": result.tokenizer,
        "num_prompts": raw.num_prompts,
        **options.metadata,
        "request_rate": "inf" if math.isinf(raw.request_rate) else raw.request_rate,
        # JSON has no infinity.
        "burstiness": "inf" if math.isinf(raw.burstiness) else raw.burstiness,
        "max_concurrency": raw.max_concurrency,
    }
    if raw.ramp_up_strategy is not None:
        data |= {
            name: getattr(raw, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        }
    data |= {
        "duration": result.duration_s,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput if options.goodput else None,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        **_of_each_request(result.outcomes),
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    for name, values in described(options, metrics):
        data[f"mean_{name}_ms"] = values.mean
        data[f"median_{name}_ms"] = values.median
        data[f"std_{name}_ms"] = values.std
        for percent, value in values.percentiles.items():
            data[f"p{_percent(percent)}_{name}_ms"] = value
    if not raw.save_detailed:
        for name in _DETAILS:
            del data[name]
    return data


def _of_each_request(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_tokens if outcome.is_success else 0 for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itl for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.start_time for outcome in outcomes],
        "queue_times": [outcome.queue_time for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def save(options: Options, result: Result) -> Path | None:
    """Writes the result file if one is asked for, and returns its path.

    Raises:
        ConfigError: it cannot be written.
    """
    raw = options.raw
    if not (raw.save_result or raw.append_result):
        return None
    path = Path(raw.result_dir or "") / (raw.result_filename or _file_name(options, result))
    text = json.dumps(as_json(options, result))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if raw.append_result else "w", encoding="utf-8") as file:
            file.write(f"\n{text}" if file.tell() else text)
    except OSError as error:
        raise ConfigError(f"--result-dir: cannot write {path}: {error.strerror or error}") from error
    return path


def _file_name(options: Options, result: Result) -> str:
    raw = options.raw
    rate = f"{raw.request_rate}qps"
    if raw.ramp_up_strategy is not None:
        rate = f"ramp-up-{raw.ramp_up_strategy}-{raw.ramp_up_start_rps}qps-{raw.ramp_up_end_rps}qps"
    limit = "" if raw.max_concurrency is None else f"-concurrency{raw.max_concurrency}"
    model = result.model.rsplit("/", maxsplit=1)[-1]
    return f"{raw.label or raw.backend}-{rate}{limit}-{model}-{result.when:%Y%m%d-%H%M%S}.json"
