"""What a streamed answer said, and when, read from its pieces."""

from __future__ import annotations

import json

import pytest

from loadtest.peers.connection import Exchange
from loadtest.peers.streams import Answer, events, read_answer


def text(word: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": word}]}).encode() + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


def exchange(*pieces: tuple[float, bytes], status: int = 200, problem: str = "") -> Exchange:
    return Exchange(sent=100.0, pieces=list(pieces), status=status, ended=True, problem=problem)


def test_an_event_came_when_its_last_byte_came() -> None:
    first, second = text(" a"), text(" b")
    whole = first + second
    pieces = [(1.0, whole[:10]), (2.0, whole[10 : len(first) + 5]), (3.0, whole[len(first) + 5 :])]
    assert [moment for moment, _ in events(pieces)] == [2.0, 3.0]


def test_events_that_come_together_have_one_time() -> None:
    assert [moment for moment, _ in events([(1.0, text(" a") + text(" b"))])] == [1.0, 1.0]


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r"])
def test_all_line_ends_are_known_and_comments_left_out(end: str) -> None:
    body = f": ping{end}data: 1{end}event: x{end[: len(end) // 2]}data:2{end}".encode()
    assert [data for _, data in events([(1.0, body)])] == ["1", "2"]


def test_an_answer_has_times_from_the_origin() -> None:
    answer = read_answer(
        exchange(
            (100.5, text(" a")), (100.75, text(" b")), (101.0, usage(7, 2)), (101.0, b"data: [DONE]\n\n")
        ),
        origin=99.0,
        max_tokens=2,
    )
    assert answer == Answer(1.0, (1.5, 1.75), 7, 2, "")
    assert answer.ttft == 0.5
    assert list(answer.gaps()) == [0.25]


def test_events_without_text_are_no_tokens() -> None:
    empty = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n'
    answer = read_answer(exchange((101.0, text(" a")), (102.0, empty), (103.0, usage(1, 1))), 0.0, 1)
    assert answer.times == (101.0,)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (exchange((101.0, text(" a") + usage(1, 3))), "3 tokens instead of 2"),
        (exchange((101.0, text(" a"))), "no usage"),
        (exchange((101.0, usage(1, 2))), "no text"),
        (exchange((101.0, b'data: {"error": "gone"}\n\n')), "the stream said: gone"),
        (exchange((101.0, b'{"error": "busy"}'), status=429), 'HTTP 429: {"error": "busy"}'),
        (exchange(problem="no connection: refused", status=0), "no connection: refused"),
        (exchange((101.0, text(" a")), problem="no answer in time"), "no answer in time"),
    ],
)
def test_what_is_wrong_is_told(given: Exchange, problem: str) -> None:
    assert read_answer(given, 0.0, max_tokens=2).problem == problem


def test_an_answer_that_was_cut_off_needs_no_count() -> None:
    assert read_answer(exchange((101.0, text(" a"))), 0.0, max_tokens=None).problem == ""
