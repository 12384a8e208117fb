"""Figures of a case, from answers whose times are known."""

from __future__ import annotations

import pytest

from loadtest.peers.client import Job, Outcome
from loadtest.peers.measuring import Measurement, evaluate, percentile
from loadtest.peers.streams import Answer


def job(count: int, document: str = "") -> Job:
    bodies = ("{}",) * count
    return Job(1, "/v1/completions", bodies, 3, count, timeout_s=1.0, document=document, alone_s=2.0)


@pytest.mark.parametrize(("percent", "value"), [(0, 10), (50, 20), (75, 30), (76, 40), (99, 40), (100, 40)])
def test_percentile_is_one_of_the_values(percent: float, value: float) -> None:
    assert percentile([40, 10, 30, 20], percent) == value


def test_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_figures() -> None:
    answers = (
        Answer(0.0, (0.25, 0.5, 1.0), prompt_tokens=4, output_tokens=3, problem=""),
        Answer(1.0, (1.5, 1.625, 2.0), prompt_tokens=6, output_tokens=3, problem=""),
    )
    figures, problems = evaluate(Outcome(answers, None, client_cpu_s=0.5), job(2))
    assert problems == ()
    assert figures == {
        "ttft_p50_ms": 250.0,
        "ttft_p99_ms": 500.0,
        "itl_p50_ms": 250.0,
        "itl_p99_ms": 500.0,
        "tokens_per_s": 3.0,
        "requests_per_s": 1.0,
        "prompt_tokens": 5.0,
        "tokens_per_event": 1.0,
        "client_cpu_share": 0.25,
    }


def test_problems_are_counted_by_kind() -> None:
    short = Answer(0.0, (1.0,), 1, 1, "1 tokens instead of 3")
    lost = Answer(0.0, (), 0, 0, "no connection")
    figures, problems = evaluate(Outcome((short, short, lost), None, 0.0), job(4))
    assert problems == (
        "2 x 1 tokens instead of 3",
        "1 x no connection",
        "1 x 3 answers to 4 requests",
    )
    assert figures["ttft_p50_ms"] == 1000.0


def test_nothing_came() -> None:
    figures, problems = evaluate(Outcome((Answer(0.0, (), 0, 0, "no connection"),), None, 0.0), job(1))
    assert figures == {}
    assert problems == ("1 x no connection",)


def beside(
    document: Answer, last: float = 14.0, gap_after: float = 0.1
) -> tuple[dict[str, float], tuple[str, ...]]:
    # Ten tokens a second alone, two a second from 4 s to 10 s.
    quick = [0.1 * i for i in range(1, 40)]
    slow = [4.0 + 0.5 * i for i in range(12)]
    after = [10.0 + gap_after * i for i in range(int((last - 10.0) / gap_after) + 1)]
    stream = Answer(0.0, (*quick, *slow, *(after if last > 10.0 else ())), 1, 0, "")
    return evaluate(Outcome((stream,), document, 0.0), job(1, document="{}"))


def test_rate_beside_a_document_is_held_against_before_and_after() -> None:
    figures, problems = beside(Answer(4.0, (10.0,), 50_000, 1, ""))
    assert problems == ()
    assert figures["document_ttft_s"] == 6.0
    assert figures["events_alone_per_s"] == pytest.approx(10.0, abs=0.51)
    assert figures["events_beside_per_s"] == 2.0
    assert figures["rate_kept"] == pytest.approx(0.2, abs=0.01)


def test_alone_the_streams_would_have_come_as_far_in_steps_of_the_mean_length() -> None:
    figures, _ = beside(Answer(4.0, (10.0,), 50_000, 1, ""), gap_after=0.5)
    assert figures["events_alone_per_s"] == pytest.approx(1 / ((0.1 + 0.5) / 2), abs=0.1)


def test_a_stream_that_ends_before_the_document_is_read_spoils_the_rate() -> None:
    figures, problems = beside(Answer(4.0, (10.0,), 50_000, 1, ""), last=0.0)
    assert problems == ("1 x a stream ended before the document was read",)
    assert "rate_kept" not in figures


def test_a_document_without_answer_is_told() -> None:
    _, problems = beside(Answer(4.0, (), 0, 0, "HTTP 400: too long"))
    assert problems == ("1 x the document: HTTP 400: too long",)


def test_a_measurement_survives_its_file() -> None:
    measurement = Measurement("a", "tiny/decode/1", 2, {"tokens_per_s": 1.5}, ("1 x no usage",))
    assert Measurement.from_line(measurement.to_line()) == measurement
