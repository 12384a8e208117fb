"""What a run must reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.load.summary import Summary


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits; None is no limit.

    Attributes:
        max_ttft_p95: milliseconds.
        max_itl_p99: milliseconds.
        min_tokens_per_s: tokens a second.
        max_error_rate: share of the requests, 0 to 1.
    """

    max_ttft_p95: float | None = None
    max_itl_p99: float | None = None
    min_tokens_per_s: float | None = None
    max_error_rate: float | None = None

    def missed(self, summary: Summary) -> Iterator[str]:
        """A line for each limit that was not kept. What was not measured keeps none."""
        if self.max_ttft_p95 is not None:
            yield from _most("TTFT p95", summary.ttft.p95, self.max_ttft_p95, summary.ttft.count)
        if self.max_itl_p99 is not None:
            yield from _most(
                "inter-token p99", summary.inter_token.p99, self.max_itl_p99, summary.inter_token.count
            )
        if self.min_tokens_per_s is not None and summary.tokens_per_s < self.min_tokens_per_s:
            yield f"{summary.tokens_per_s:.1f} tokens/s is less than {self.min_tokens_per_s:g}"
        if self.max_error_rate is not None:
            if not summary.requests:
                yield "no request ended, so there is no error rate"
            elif summary.error_rate > self.max_error_rate:
                yield f"error rate {summary.error_rate:.4f} is more than {self.max_error_rate:g}"


def _most(name: str, value: float, most: float, count: int) -> Iterator[str]:
    if not count:
        yield f"{name} was not measured"
    elif value > most:
        yield f"{name} {value:.1f} ms is more than {most:g} ms"
