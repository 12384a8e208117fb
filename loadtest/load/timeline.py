"""A run second by second, for its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.load.histogram import Histogram, merge, since

MOST_SAMPLES = 600


@dataclass(frozen=True, slots=True)
class Sample:
    """What came in one interval.

    Attributes:
        end_s: of the interval, from the start of the test.
        seconds: its length.
        users: at its end.
        tokens, requests, errors: how many.
        ttft, inter_token: milliseconds.
    """

    end_s: float
    seconds: float
    users: int
    tokens: int
    requests: int
    errors: int
    ttft: Histogram = field(default_factory=dict)
    inter_token: Histogram = field(default_factory=dict)


class Timeline:
    """Keeps samples, no more than a picture can show: when there are too many, neighbours become one."""

    def __init__(self, most: int = MOST_SAMPLES) -> None:
        self._most = most
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Takes in the next sample."""
        self._samples = coarsened([*self._samples, sample], self._most)

    @property
    def samples(self) -> Sequence[Sample]:
        """From the start to the end."""
        return tuple(self._samples)


def coarsened(samples: Sequence[Sample], most: int) -> list[Sample]:
    """No more than `most` samples: where there are more, each two neighbours become one."""
    kept = list(samples)
    while len(kept) > most:
        pairs = zip(kept[::2], kept[1::2], strict=False)
        kept = [_join(*pair) for pair in pairs] + kept[len(kept) // 2 * 2 :]
    return kept


def _join(first: Sample, second: Sample) -> Sample:
    return Sample(
        second.end_s,
        first.seconds + second.seconds,
        second.users,
        first.tokens + second.tokens,
        first.requests + second.requests,
        first.errors + second.errors,
        merge((first.ttft, second.ttft)),
        merge((first.inter_token, second.inter_token)),
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """Everything so far, as it is read at some moment.

    Attributes:
        at_s: the moment, from the start of the test.
        tokens, requests, errors: how many.
        ttft, inter_token: milliseconds.
    """

    at_s: float = 0.0
    tokens: int = 0
    requests: int = 0
    errors: int = 0
    ttft: Histogram = field(default_factory=dict)
    inter_token: Histogram = field(default_factory=dict)

    def since(self, before: Counts, users: int) -> Sample:
        """What came after `before`. Where counting began anew meanwhile, all there is."""
        return Sample(
            self.at_s,
            self.at_s - before.at_s,
            users,
            _more(self.tokens, before.tokens),
            _more(self.requests, before.requests),
            _more(self.errors, before.errors),
            since(self.ttft, before.ttft),
            since(self.inter_token, before.inter_token),
        )


def _more(now: int, before: int) -> int:
    return now - before if now >= before else now
