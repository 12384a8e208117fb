"""Tables of medians and ratios."""

from __future__ import annotations

from pathlib import Path

from loadtest.peers.measuring import Measurement
from loadtest.peers.report import ratios, read_results, report

CASE = "tiny/decode/64"


def measured(
    peer: str, number: int, tokens_per_s: float, *problems: str, prompt_tokens: float = 32
) -> Measurement:
    figures = {"tokens_per_s": tokens_per_s, "prompt_tokens": prompt_tokens}
    return Measurement(peer, CASE, number, figures, problems)


ROUNDS = [
    measured("ours", 0, 900),
    measured("theirs", 0, 300),
    measured("ours", 1, 2000),
    measured("theirs", 1, 500),
    measured("ours", 2, 1000),
    measured("theirs", 2, 200),
]


def test_ratios_are_taken_within_a_round() -> None:
    assert ratios(ROUNDS, "ours", "theirs", "tokens_per_s") == [3.0, 4.0, 5.0]


def test_a_round_in_which_one_has_no_figure_gives_no_ratio() -> None:
    assert ratios(ROUNDS[:3], "ours", "theirs", "tokens_per_s") == [3.0]


def test_report_has_medians_of_figures_and_of_ratios() -> None:
    lines = report(ROUNDS).splitlines()
    assert f"## {CASE}" in lines
    assert "Medians of 3 rounds." in lines
    assert "| ours | 1,000 |" in lines
    assert "| theirs | 300 |" in lines
    assert "| ours / theirs | 4.00 (3.00 to 5.00) |" in lines


def test_report_tells_what_was_wrong() -> None:
    text = report([measured("ours", 0, 1.0), measured("theirs", 0, 1.0, "2 x no usage", prompt_tokens=33)])
    assert "- theirs, round 1: WRONG: 2 x no usage" in text
    assert "- prompt tokens are counted differently: ours 32.0, theirs 33.0" in text


def test_a_server_alone_has_no_ratios() -> None:
    assert "Ratios" not in report(ROUNDS[:1])


def test_files_of_several_runs_are_taken_together(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("".join(each.to_line() + "\n" for each in ROUNDS[:4]))
    second.write_text("".join(each.to_line() + "\n" for each in ROUNDS[:2]))
    together = read_results([first, second])
    assert [each.round for each in together] == [0, 0, 1, 1, 2, 2]
    assert ratios(together, "ours", "theirs", "tokens_per_s") == [3.0, 4.0, 3.0]
