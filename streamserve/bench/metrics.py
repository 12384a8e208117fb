"""The figures of a run, under the names and definitions of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streamserve.bench.timing import Outcome


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds.

    Attributes:
        mean, median, std: of all values; 0 if there are none.
        percentiles: by percent, interpolated linearly.
    """

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Metrics:
    """What is reported. Only requests that succeeded count, except in `failed`.

    Attributes:
        completed, failed: requests.
        total_input, total_output: tokens.
        request_throughput, request_goodput: requests a second, the latter of those that met all objectives.
        output_throughput, total_token_throughput: tokens a second.
        max_output_tokens_per_s: most chunks that came within one second, counted from the first request.
        max_concurrent_requests: most requests that were open within one such second.
        ttft, tpot, itl, e2el: to the first token; of each further one, a value for each request; between
            chunks, a value for each gap; to the last token.
        client_queue_time, e2el_including_client_queue: what a limit of concurrency added.
    """

    completed: int
    failed: int
    total_input: int
    total_output: int
    request_throughput: float
    request_goodput: float
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution
    client_queue_time: Distribution
    e2el_including_client_queue: Distribution


def distribution(seconds: Iterable[float], percents: Sequence[float]) -> Distribution:
    """Describes values in seconds, in milliseconds."""
    values = np.fromiter(seconds, float) * 1000.0
    if not len(values):
        return Distribution(0.0, 0.0, 0.0, dict.fromkeys(percents, 0.0))
    return Distribution(
        float(np.mean(values)),
        float(np.median(values)),
        float(np.std(values)),
        {percent: float(np.percentile(values, percent)) for percent in percents},
    )


def calculate(
    outcomes: Sequence[Outcome],
    duration_s: float,
    percents: Sequence[float],
    objectives: Mapping[str, float],
) -> Metrics:
    """Works the figures out.

    Args:
        outcomes: of all requests.
        duration_s: from the first request to the last answer.
        percents: percentiles to give.
        objectives: most milliseconds of some of `names.GOODPUT_METRICS` for a request to be a good one.
    """
    good = [outcome for outcome in outcomes if outcome.is_success]
    total_input = sum(outcome.prompt_len for outcome in good)
    total_output = sum(outcome.output_tokens for outcome in good)
    tokens, concurrent = _peaks(good)
    return Metrics(
        completed=len(good),
        failed=len(outcomes) - len(good),
        total_input=total_input,
        total_output=total_output,
        request_throughput=len(good) / duration_s,
        request_goodput=sum(_meets(outcome, objectives) for outcome in good) / duration_s
        if objectives
        else 0.0,
        output_throughput=total_output / duration_s,
        total_token_throughput=(total_input + total_output) / duration_s,
        max_output_tokens_per_s=tokens,
        max_concurrent_requests=concurrent,
        ttft=distribution((outcome.ttft for outcome in good), percents),
        tpot=distribution((outcome.tpot for outcome in good if outcome.output_tokens > 1), percents),
        itl=distribution((gap for outcome in good for gap in outcome.itl), percents),
        e2el=distribution((outcome.latency for outcome in good), percents),
        client_queue_time=distribution((outcome.queue_time for outcome in good), percents),
        e2el_including_client_queue=distribution(
            (outcome.latency + outcome.queue_time for outcome in good), percents
        ),
    )


def _meets(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    values = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(values[name] * 1000.0 <= most for name, most in objectives.items())


def _peaks(outcomes: Sequence[Outcome]) -> tuple[float, int]:
    """Most chunks, and most open requests, in any of the seconds since the first request."""
    if not outcomes:
        return 0.0, 0
    origin = min(outcome.start_time for outcome in outcomes)
    end = max(outcome.start_time + outcome.latency for outcome in outcomes)
    num_seconds = math.ceil(end - origin) + 1
    tokens = np.zeros(num_seconds)
    concurrent = np.zeros(num_seconds, int)
    for outcome in outcomes:
        begun = outcome.start_time - origin
        times = begun + outcome.ttft + np.concatenate(([0.0], np.cumsum(outcome.itl)))
        tokens += np.bincount(times.astype(int), minlength=num_seconds)[:num_seconds]
        concurrent[int(begun) : int(begun + outcome.latency) + 1] += 1
    return float(tokens.max()), int(concurrent.max())
