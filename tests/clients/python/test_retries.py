from __future__ import annotations

from datetime import UTC, datetime

import pytest

from streamserve_client import AnswerTimeout, BadRequest, ConnectionFailed, RateLimited, Retries
from streamserve_client.endpoints import CHAT
from streamserve_client.place import Place
from streamserve_client.retries import Attempts, parse_retry_after

BROKEN = ConnectionFailed("broken")


def busy(retry_after_s=None):
    return RateLimited("busy", status=429, retry_after_s=retry_after_s)


@pytest.mark.parametrize(("chance", "expected"), [(1.0, [1, 2, 4, 8, 8]), (0.0, [0.5, 1, 2, 4, 4])])
def test_waits_double_up_to_a_limit_and_differ_by_chance(chance, expected):
    retries = Retries(max_retries=5, first_delay_s=1, max_delay_s=8, chance=lambda: chance)
    assert [retries.delay_s(number, BROKEN) for number in range(1, 6)] == expected
    assert retries.delay_s(6, BROKEN) is None


def test_nobody_comes_before_the_time_that_the_server_names():
    retries = Retries(first_delay_s=1, max_delay_s=60, chance=lambda: 0.0)
    assert retries.delay_s(1, busy(7)) == 7.5
    assert retries.delay_s(1, busy(0)) == 0.5
    assert retries.delay_s(1, busy(60)) == 60
    # It is no use to come earlier, and too long to wait.
    assert retries.delay_s(1, busy(61)) is None


@pytest.mark.parametrize(
    "error", [AnswerTimeout("late"), BadRequest("wrong", status=400), RateLimited("in a stream", status=None)]
)
def test_what_would_fail_again_is_not_tried_again(error):
    assert Retries().delay_s(1, error) is None


def test_the_last_error_is_the_one_that_is_raised():
    attempts = Attempts(Retries(max_retries=1))
    attempts.delay_s(BROKEN)
    last = busy()
    with pytest.raises(RateLimited) as raised:
        attempts.delay_s(last)
    assert raised.value is last


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        (" 12 ", 12.0),
        ("soon", None),
        ("-1", None),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2015 07:28:30 -0000", 30.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0),
        ("Mon, 01 Jan 99999999999 00:00:00 GMT", None),
        ("Mon, 01 Jan 2020 00:00:00 +9999999", None),
    ],
)
def test_retry_after(header, seconds):
    assert parse_retry_after(header, datetime(2015, 10, 21, 7, 28, tzinfo=UTC)) == seconds


def test_coming_back_ends_by_the_clock_too(monkeypatch):
    """Tries take their time: each may wait for a connection that does not come."""
    now_s = [100.0]
    monkeypatch.setattr("streamserve_client.retries.time.monotonic", lambda: now_s[0])
    place = Place(CHAT.call([], {}, None), is_kept=True)
    place.attach("chatcmpl-x")
    place.takes_number(1)
    attempts = Attempts(Retries(resume_s=60, chance=lambda: 1.0))
    waits = []
    for number in range(6):
        waits.append(attempts.stream_delay_s(BROKEN, place, has_begun=True))
        now_s[0] += 25
        if number == 0:
            # Something comes: the time begins anew.
            place.takes_number(2)
    assert waits == [0.5, 0.5, 1.0, 2.0, 4.0, 5.0]
    assert attempts.stream_delay_s(BROKEN, place, has_begun=True) is None
