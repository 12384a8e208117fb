"""Tables of medians over the rounds, and of ratios between servers within a round.

`python -m loadtest.peers.report FILE…` makes them of what `python -m loadtest.peers --json FILE` wrote,
in one run or several.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from loadtest.peers.measuring import Measurement


@dataclass(frozen=True, slots=True)
class Figure:
    """A column.

    Attributes:
        name: of the figure in `Measurement.figures`.
        label: of the column, with the unit.
        digits: after the decimal point.
    """

    name: str
    label: str
    digits: int


FIGURES = (
    Figure("ready_s", "ready s", 2),
    Figure("first_token_s", "first token s", 2),
    Figure("start_cpu_s", "start CPU s", 2),
    Figure("ttft_p50_ms", "TTFT p50 ms", 1),
    Figure("ttft_p99_ms", "TTFT p99 ms", 1),
    Figure("itl_p50_ms", "inter-token p50 ms", 1),
    Figure("itl_p99_ms", "inter-token p99 ms", 1),
    Figure("tokens_per_s", "tokens/s", 0),
    Figure("requests_per_s", "requests/s", 2),
    Figure("cpu_s_per_1k", "CPU s per 1,000 tokens", 2),
    Figure("document_ttft_s", "document TTFT s", 1),
    Figure("events_alone_per_s", "events/s alone", 0),
    Figure("events_beside_per_s", "events/s beside document", 0),
    Figure("rate_kept", "rate kept", 2),
    Figure("pss_mb", "memory MB (PSS)", 0),
    Figure("tokens_per_event", "tokens an event", 2),
    Figure("client_cpu_share", "client CPU", 2),
)


def report(measurements: Sequence[Measurement]) -> str:
    """All cases as Markdown: medians, ratios of the first server to each other one, and what went wrong."""
    cases = dict.fromkeys(measurement.case for measurement in measurements)
    return "\n".join(_case([each for each in measurements if each.case == case]) for case in cases)


def _case(measurements: Sequence[Measurement]) -> str:
    peers = list(dict.fromkeys(measurement.peer for measurement in measurements))
    shown = [figure for figure in FIGURES if any(figure.name in each.figures for each in measurements)]
    rounds = len({measurement.round for measurement in measurements})
    lines = [f"## {measurements[0].case}", "", f"Medians of {rounds} rounds.", ""]
    lines += _table(["", *(figure.label for figure in shown)])
    for peer in peers:
        lines.append(_row([peer, *(_median(measurements, peer, figure) for figure in shown)]))
    if len(peers) > 1:
        lines += ["", "Ratios within a round: median (least to greatest).", ""]
        lines += _table(["", *(figure.label for figure in shown)])
        for peer in peers[1:]:
            ratios = (_ratio(measurements, peers[0], peer, figure) for figure in shown)
            lines.append(_row([f"{peers[0]} / {peer}", *ratios]))
    lines += [""] + [f"- {problem}" for problem in _problems(measurements)]
    return "\n".join(lines) + "\n"


def _median(measurements: Iterable[Measurement], peer: str, figure: Figure) -> str:
    values = [
        each.figures[figure.name]
        for each in measurements
        if each.peer == peer and figure.name in each.figures
    ]
    return f"{median(values):,.{figure.digits}f}" if values else "-"


def ratios(measurements: Iterable[Measurement], first: str, second: str, name: str) -> list[float]:
    """What `first` has of a figure over what `second` has, for each round in which both have it."""
    by_round: dict[int, dict[str, float]] = {}
    for each in measurements:
        if name in each.figures:
            by_round.setdefault(each.round, {})[each.peer] = each.figures[name]
    return [
        values[first] / values[second]
        for values in by_round.values()
        if first in values and values.get(second, 0.0) > 0.0
    ]


def _ratio(measurements: Iterable[Measurement], first: str, second: str, figure: Figure) -> str:
    values = ratios(measurements, first, second, figure.name)
    if not values:
        return "-"
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _problems(measurements: Iterable[Measurement]) -> list[str]:
    problems = [
        f"{each.peer}, round {each.round + 1}: WRONG: {problem}"
        for each in measurements
        for problem in each.problems
    ]
    counts: dict[str, float] = {
        each.peer: each.figures["prompt_tokens"] for each in measurements if "prompt_tokens" in each.figures
    }
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{peer} {count:.1f}" for peer, count in counts.items())
        problems.append(f"prompt tokens are counted differently: {told}")
    return problems


def _table(header: Sequence[str]) -> list[str]:
    return [_row(header), _row(["---"] * len(header))]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read_results(paths: Iterable[Path]) -> list[Measurement]:
    """All measurements in the files; the rounds of one come after those of the one before."""
    measurements: list[Measurement] = []
    for path in paths:
        first = max((each.round for each in measurements), default=-1) + 1
        lines = path.read_text().splitlines()
        measurements += [
            replace(each, round=each.round + first) for each in map(Measurement.from_line, lines)
        ]
    return measurements


if __name__ == "__main__":
    print(report(read_results(map(Path, sys.argv[1:]))))
