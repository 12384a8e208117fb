"""What the dashboard's events hold, as /openapi.json describes them."""

from __future__ import annotations

from pydantic import Field

from streamserve.frontend.api.replies import Reply


class EngineLife(Reply):
    """Whether there is an engine."""

    up: int
    restarts: int = Field(description="How often it was started again.")


class RequestCounts(Reply):
    """Requests at this moment."""

    running: int | None
    waiting: int | None
    open: float = Field(description="Answers that somebody is waiting for.")


class TokenRates(Reply):
    """Tokens a second, of the last 3 seconds."""

    generated: float | None
    prompt: float | None


class Quantiles(Reply):
    """Seconds, of the last 30 seconds; null if there was nothing to time."""

    p50: float | None
    p95: float | None
    p99: float | None


class CacheShares(Reply):
    """Shares, 0 to 1."""

    used: float | None = Field(description="Of the KV cache's blocks.")
    hits: float | None = Field(description="Of the prompt tokens of the last 30 seconds that it had.")


class StepMeans(Reply):
    """Steps of the engine, of the last 3 seconds; null if there were none."""

    per_s: float | None
    tokens: float | None = Field(description="In a step.")
    host_s: float | None = Field(description="Deciding what runs, taking tokens in and sending them.")
    model_s: float | None = Field(description="The worker.")
    device_idle_s: float | None = Field(description="The GPU waiting for the host between two steps.")


class RingShares(Reply):
    """How full the fullest ring of all frontends is, 0 to 1."""

    request: float
    delta: float


class ErrorCounts(Reply):
    """Of the last 30 seconds."""

    failed: float = Field(description="Answers that an error ended.")
    rejected: float = Field(description="Requests that were turned away unserved.")
    http_5xx: float = Field(description="HTTP answers with such a status.")


class ProcessNumbers(Reply):
    """One process of the server; the last four are of frontends."""

    pid: int
    cpu: float | None = Field(description="Processors kept busy in the last 3 seconds.")
    memory_bytes: float
    streams: float = 0.0
    loop_lag_s: float = Field(0.0, description="How late its event loop runs.")
    request_ring: float = Field(0.0, description="How full it is, 0 to 1.")
    delta_ring: float = 0.0


class Snapshot(Reply):
    """What the dashboard shows; the rings and counters are those of all frontends."""

    at: float = Field(description="Seconds of a clock that all processes of the machine share.")
    engine: EngineLife
    requests: RequestCounts
    tokens_per_s: TokenRates
    first_token_s: Quantiles
    between_tokens_s: Quantiles
    cache: CacheShares
    steps: StepMeans
    rings: RingShares
    errors: ErrorCounts
    processes: dict[str, ProcessNumbers]
