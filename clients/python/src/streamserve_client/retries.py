"""When a request is made again, and after how long: decided here, waited elsewhere."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from streamserve_client.errors import RETRYABLE_STATUSES, APIError, ClientError, ConnectionFailed
from streamserve_client.place import Place

# A reader waits in the middle of a text: the longest wait between two tries to go on with it.
MAX_RETURN_DELAY_S = 5.0
# What counts of a try that went on for longer: there was a connection then, on which a stream had to wait.
MAX_TRY_S = 10.0


@dataclass(frozen=True, slots=True)
class Retries:
    """Answers 429 and 503, and lost connections, are tried again as long as nothing of the answer has come.
    A stream that breaks off later is gone on with where it stopped, if the server can do that.

    The wait doubles with each failure and is between half and the whole of that, so that many clients do not
    come back at the same moment. Where the server names a time (Retry-After), the wait is added to it.

    Attributes:
        max_retries: tries after the first one; 0 for none.
        first_delay_s: wait after the first failure, at most.
        max_delay_s: longest wait. If the server names a longer time, the error is raised instead.
        resume_s: time without anything of a stream, from when it broke off until it is given up. With 0
            streams end with their connections, also on the server.
        chance: a number from 0 to 1.
    """

    max_retries: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 60.0
    resume_s: float = 60.0
    chance: Callable[[], float] = random.random

    def delay_s(self, num_failures: int, error: ClientError) -> float | None:
        """Seconds until the next try; None if there is to be none.

        Args:
            num_failures: tries that have failed, this one included.
            error: how it failed.
        """
        if not _is_passing(error):
            return None
        return self.passing_delay_s(num_failures, error)

    def passing_delay_s(self, num_failures: int, error: ClientError) -> float | None:
        """The same for an error after which it makes sense to try again, whatever it is."""
        if num_failures > self.max_retries:
            return None
        return self._wait_s(num_failures, error, self.max_delay_s, self.max_delay_s)

    def return_delay_s(self, num_failures: int, waited_s: float, error: ClientError) -> float | None:
        """Seconds until the next try to go on with a stream; None if there is to be none.

        Args:
            num_failures: tries since something came, this one included.
            waited_s: since then.
            error: how it failed.
        """
        left_s = self.resume_s - waited_s
        return None if left_s <= 0 else self._wait_s(num_failures, error, MAX_RETURN_DELAY_S, left_s)

    def _wait_s(
        self, num_failures: int, error: ClientError, max_backoff_s: float, limit_s: float
    ) -> float | None:
        # Large powers are no floats.
        backoff_s = min(self.first_delay_s * 2.0 ** min(num_failures - 1, 60), max_backoff_s)
        backoff_s *= (1 + self.chance()) / 2
        asked_s = error.retry_after_s if isinstance(error, APIError) else None
        if asked_s is None:
            return min(backoff_s, limit_s)
        return None if asked_s > limit_s else min(asked_s + backoff_s, limit_s)


class Attempts:
    """The tries of one request."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._num_failures = 0
        self._num_events = 0
        # In waits and tries since something came, and the time of the next try.
        self._waited_s = 0.0
        self._retry_s: float | None = None

    def delay_s(self, error: ClientError) -> float:
        """Seconds until the next try after one that failed with `error`, which is raised if there is none."""
        self._num_failures += 1
        delay_s = self._retries.delay_s(self._num_failures, error)
        if delay_s is None:
            raise error
        return delay_s

    def stream_delay_s(self, error: ClientError, place: Place, *, has_begun: bool) -> float | None:
        """The same for a stream; None if there is to be no other try.

        Args:
            error: how the last one failed.
            place: where the stream is.
            has_begun: something of it has come, and it cannot be begun anew.
        """
        now_s = time.monotonic()
        if place.num_events > self._num_events:
            self._num_events, self._num_failures, self._waited_s = place.num_events, 0, 0.0
        elif self._retry_s is not None:
            self._waited_s += min(max(now_s - self._retry_s, 0.0), MAX_TRY_S)
        self._num_failures += 1
        if not (place.can_return(error) if has_begun else place.is_unreached(error)):
            return None
        if not (has_begun or place.is_kept_there):
            return self._retries.passing_delay_s(self._num_failures, error)
        delay_s = self._retries.return_delay_s(self._num_failures, self._waited_s, error)
        if delay_s is not None:
            self._waited_s += delay_s
            self._retry_s = now_s + delay_s
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
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())
    except (ValueError, OverflowError):
        return None
