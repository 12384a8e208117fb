from __future__ import annotations

import pytest

from streamserve.supervisor.reports import Failed, Progress, ProgressLog, Ready, ReportDecoder

STREAM = (
    b'{"type": "progress", "what": "loading weights", "fraction": 0}\n'
    b'{"type": "progress", "what": "loading weights", "fraction": 0.5}\n'
    b'{"type": "ready", "facts": {"num_blocks": 7}}\n'
    b'{"type": "failed", "message": "no\\n  memory"}\n'
)
REPORTS = [
    Progress("loading weights", 0.0),
    Progress("loading weights", 0.5),
    Ready({"num_blocks": 7}),
    Failed("no memory"),
]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 4096])
def test_reports_however_they_are_cut(size: int) -> None:
    decoder = ReportDecoder()
    chunks = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [report for chunk in chunks for report in decoder.decode(chunk)] == REPORTS


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"[]",
        b'{"type": "other"}',
        b'{"type": "ready"}',
        b'{"type": "progress", "what": 1, "fraction": 0}',
    ],
)
def test_what_is_no_report_is_said_so(line: bytes) -> None:
    with pytest.raises(ValueError):
        ReportDecoder().decode(line + b"\n")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_thousand_steps_are_a_few_lines() -> None:
    lines: list[str] = []
    clock = Clock()
    log = ProgressLog(lines.append, interval_s=5.0, clock=clock)
    for step in range(1001):
        log.report("engine", "loading weights", step / 1000)
        clock.now_s += 1 / 64
    log.report("engine", "sizing the cache", 0.0)
    assert lines == [
        "engine: loading weights",
        "engine: loading weights, 32%",
        "engine: loading weights, 64%",
        "engine: loading weights, 96%",
        "engine: sizing the cache",
    ]


def test_a_quick_stage_is_one_line_and_standing_still_is_none() -> None:
    lines: list[str] = []
    clock = Clock()
    log = ProgressLog(lines.append, interval_s=5.0, clock=clock)
    log.report("model", "converting", 0.0)
    log.report("model", "converting", 1.0)
    log.report("engine", "loading weights", 0.1)
    for _ in range(10):
        clock.now_s += 10.0
        log.report("engine", "loading weights", 0.1)
    assert lines == ["model: converting", "engine: loading weights, 10%"]
    assert log.latest("engine") == "loading weights, 10%"
    assert log.latest("frontend") is None
