"""How the comparison with vLLM's scheduler compares, without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from loadtest.micro import vllm_scheduler
from loadtest.micro.vllm_scheduler import ROUNDS, child, compare


class Scripted:
    """Turns whose times are known."""

    def __init__(self, *times: Mapping[str, float]) -> None:
        self._times: Iterator[Mapping[str, float]] = iter(times)

    def turn(self, num_seqs: int) -> Mapping[str, float]:
        assert num_seqs == 64
        return next(self._times)


def test_the_median_of_the_ratios_of_neighbouring_turns_counts(capsys: pytest.CaptureFixture[str]) -> None:
    # A machine that is slower and slower: the ratio stays 1/4, but in two rounds.
    slowdowns = [1.0 + number for number in range(ROUNDS)]
    ours = [{"step": 100e-6 * (10 if number < 2 else 1) * slow} for number, slow in enumerate(slowdowns)]
    theirs = [
        {"schedule": 250e-6 * slow, "update_from_output": 100e-6 * slow, "encode": 50e-6 * slow}
        for slow in slowdowns
    ]
    assert compare(Scripted(*ours), Scripted(*theirs), 64) == pytest.approx(0.25)
    assert "ours / vLLM 0.250; 0.286 without its encoding" in capsys.readouterr().out


def test_where_vllm_is_not_installed_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMSERVE_CACHE", str(tmp_path))
    assert vllm_scheduler.main([]) == 0
    assert capsys.readouterr().out.startswith("skipped: ")


ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"step": float(line)}), flush=True)
"""


def test_a_child_answers_until_its_input_ends() -> None:
    with child([sys.executable, "-c", ECHO]) as echo:
        assert echo.turn(64) == {"step": 64.0}
        assert echo.turn(256) == {"step": 256.0}
    assert echo.process.returncode == 0


def test_a_child_that_ends_says_why() -> None:
    with (
        child([sys.executable, "-c", "raise SystemExit('no such module')"]) as broken,
        pytest.raises(RuntimeError, match="ended with 1: no such module"),
    ):
        broken.turn(64)
