"""The metrics of the frontends: what each family is called, how it is labelled, and what it means.

Names, labels and buckets are vLLM's where it has them; some buckets are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from streamserve.frontend.paths import HANDLERS

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
# vLLM's begin with 0.01, which is longer than most tokens take on a GPU.
BETWEEN_TOKENS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
EXCHANGE_S = (0.1, 0.5, 1.0)
EXCHANGE_FINE_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0,
    30.0, 60.0,
)  # fmt: skip
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SOCKET_S = (0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("max_waiting", "max_queue_time")
METHODS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD", "other")
STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx")
RINGS = ("request", "delta")
# Of those that vLLM has, these make sense without other machines; its dashboards ask for the last by name.
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_TIERS = ("device",)


class Kind(Enum):
    """What a family counts, under the name that Prometheus has for it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


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
        return 1 if self.kind in (Kind.COUNTER, Kind.GAUGE) else len(self.buckets) + 2


def _single(*values: str) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


def _requests() -> list[Family]:
    def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Family:
        return Family(name, Kind.HISTOGRAM, help, buckets=buckets)

    return [
        Family("vllm:prompt_tokens", Kind.COUNTER, "Prompt tokens of requests that got a first token."),
        Family("vllm:prompt_tokens_cached", Kind.COUNTER, "Those of them that were in the prefix cache."),
        Family(
            "vllm:prompt_tokens_by_source",
            Kind.COUNTER,
            "The same tokens by where their keys and values came from.",
            ("source",),
            _single(*PROMPT_SOURCES),
        ),
        Family(
            "vllm:prompt_tokens_cached_by_source",
            Kind.COUNTER,
            "The cached ones by the memory that held them.",
            ("source",),
            _single(*CACHE_TIERS),
        ),
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
        histogram("vllm:request_queue_time_seconds", "From acceptance until it began to run.", REQUEST_S),
        histogram("vllm:request_prefill_time_seconds", "From then to the first token.", REQUEST_S),
        histogram("vllm:request_decode_time_seconds", "From the first token to the last.", REQUEST_S),
        histogram("vllm:request_inference_time_seconds", "Prefill and decode together.", REQUEST_S),
        histogram("vllm:request_prompt_tokens", "Prompt tokens of finished requests.", TOKENS),
        histogram("vllm:request_prefill_kv_computed_tokens", "Those of them that were not cached.", TOKENS),
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
            "HTTP requests; probes, /metrics itself and the dashboard's stream are not counted.",
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
        Family(
            "http_request_duration_highr_seconds",
            Kind.HISTOGRAM,
            "The same in finer steps, of all handlers and methods.",
            buckets=EXCHANGE_FINE_S,
        ),
        Family(
            "http_request_size_bytes",
            Kind.SUMMARY,
            "Bytes of a request's body that were taken in.",
            ("handler",),
            _single(*HANDLERS),
        ),
        Family(
            "http_response_size_bytes",
            Kind.SUMMARY,
            "The Content-Length of an answer; 0 for one that comes as a stream.",
            ("handler",),
            _single(*HANDLERS),
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
        Family(
            "streamserve:frontend_restarts",
            Kind.COUNTER,
            "How often it was started again after it had died.",
            by_frontend=True,
        ),
        Family(
            "streamserve:engine_outage_seconds",
            Kind.SUMMARY,
            "How long it was without an engine after one had died.",
            by_frontend=True,
        ),
        gauge("streams_open", "Answers that are being made."),
        gauge("streams_detached", "Those of them that have lost their connection, and go on."),
        gauge("resume_buffer_bytes", "Memory of the events that are kept for who comes back."),
        gauge("dashboard_watchers", "Open streams of the dashboard."),
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


def _resumption() -> list[Family]:
    def counter(name: str, help: str) -> Family:
        return Family(f"streamserve:streams_{name}", Kind.COUNTER, help)

    return [
        counter("resumed", "How often a connection took up a stream that had lost another."),
        counter("expired", "Streams that were aborted because nobody came back in time."),
        counter("not_kept", "Streams that could not be made resumable, for want of room."),
    ]


def _recovery() -> list[Family]:
    def counter(name: str, help: str) -> Family:
        return Family(f"streamserve:requests_{name}", Kind.COUNTER, help)

    return [
        counter("continued", "How often a request was taken over by another engine than had run it."),
        counter("suspected", "How often one was to run alone, since several engines had died running it."),
        counter("poisonous", "Requests that were failed because engines died of them."),
    ]


def families(key_names: Sequence[str]) -> tuple[Family, ...]:
    """All of them, in the order in which they are shown.

    Args:
        key_names: names of the API keys, "" for requests without one.
    """
    return (
        *_requests(),
        *_transport(),
        *_resumption(),
        *_recovery(),
        *_by_key(key_names),
        *_by_frontend(),
    )
