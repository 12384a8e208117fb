"""When a request is made again, and after how long: decided here, waited elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from streamserve_client.errors import RETRYABLE_STATUSES, APIError, ClientError, ConnectionFailed


@dataclass(frozen=True, slots=True)
class Retries:
    """Answers 429 and 503, and lost connections, are tried again as long as nothing of the answer has come.

    The wait doubles with each failure and is between half and the whole of that, so that many clients do not
    come back at the same moment. Where the server names a time (Retry-After), the wait is added to it.

    Attributes:
        max_retries: tries after the first one; 0 for none.
        first_delay_s: wait after the first failure, at most.
        max_delay_s: longest wait. If the server names a longer time, the error is raised instead.
        chance: a number from 0 to 1.
    """

    max_retries: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 60.0
    chance: Callable[[], float] = random.random

    def delay_s(self, num_failures: int, error: ClientError) -> float | None:
        """Seconds until the next try; None if there is to be none.

        Args:
            num_failures: tries that have failed, this one included.
            error: how it failed.
        """
        if num_failures > self.max_retries or not _is_passing(error):
            return None
        backoff_s = min(self.first_delay_s * 2.0 ** (num_failures - 1), self.max_delay_s)
        backoff_s *= (1 + self.chance()) / 2
        asked_s = error.retry_after_s if isinstance(error, APIError) else None
        if asked_s is None:
            return backoff_s
        return None if asked_s > self.max_delay_s else min(asked_s + backoff_s, self.max_delay_s)


class Attempts:
    """The tries of one request."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._num_failures = 0

    def delay_s(self, error: ClientError) -> float:
        """Seconds until the next try after one that failed with `error`, which is raised if there is none."""
        self._num_failures += 1
        delay_s = self._retries.delay_s(self._num_failures, error)
        if delay_s is None:
            raise error
        return delay_s


def _is_passing(error: ClientError) -> bool:
    if isinstance(error, APIError):
        return error.status in RETRYABLE_STATUSES
    return isinstance(error, ConnectionFailed)


def parse_retry_after(value: str | None, now: datetime | None = None) -> float | None:
    """The seconds in a Retry-After header: a number, or a date as proxies write it. None if it is neither.

    Args:
        now: what a date is compared with; by default the time of the call.
    """
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())
