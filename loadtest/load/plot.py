"""A run as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.load.histogram import Histogram, percentile
from loadtest.load.summary import Quantiles, Summary
from loadtest.load.timeline import Sample, coarsened

# More of them, and a line shows chance instead of the run.
_MOST_POINTS = 40
_INK, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
# Told apart by lightness, width and dashes too: with few requests a second p95 lies under p99.
_LINES: dict[int, dict[str, Any]] = {
    50: {"color": "#2b7bba", "linewidth": 1.6},
    95: {"color": "#f0a202", "linewidth": 2.8},
    99: {"color": "#a3182d", "linewidth": 1.2, "linestyle": (0, (4, 1.5))},
}
_AREA = "#2b7bba"
_USERS = "#616e7c"
_ERRORS = "#d1495b"


def plot(samples: Sequence[Sample], summary: Summary, path: Path, title: str) -> None:
    """Draws tokens/s with the number of users, requests/s with errors, TTFT and inter-token time.

    Args:
        samples: of the run, in order.
        summary: of the whole run, for the headings.
        path: of the PNG file.
        title: what was tested.
    """
    samples = coarsened(samples, _MOST_POINTS)
    figure = Figure(figsize=(10, 6.2), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.04, hspace=0.04)
    figure.suptitle(title, fontsize=12, color=_INK, x=0.012, ha="left", fontweight="bold")
    axes = figure.subplots(2, 2, sharex=True)
    _tokens(axes[0][0], samples, summary)
    _requests(axes[0][1], samples, summary)
    _latency(axes[1][0], samples, summary.ttft, "time to first token, ms", lambda sample: sample.ttft)
    _latency(
        axes[1][1], samples, summary.inter_token, "inter-token time, ms", lambda sample: sample.inter_token
    )
    for axis in axes[1]:
        axis.set_xlabel("seconds since the start", color=_FAINT, fontsize=9)
    figure.savefig(path, metadata={"Software": None})


def _style(axis: Any, heading: str, figures: str) -> None:
    axis.set_title(heading, loc="left", fontsize=10, color=_INK, fontweight="bold")
    axis.set_title(figures, loc="right", fontsize=8.5, color=_FAINT)
    axis.grid(axis="y", color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8.5, colors=_FAINT, length=0)
    for side, spine in axis.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    axis.set_ylim(bottom=0)
    axis.margins(x=0)
    axis.set_xlim(left=0)


def _tokens(axis: Any, samples: Sequence[Sample], summary: Summary) -> None:
    times = [sample.end_s for sample in samples]
    rates = [sample.tokens / sample.seconds for sample in samples]
    axis.fill_between(times, rates, color=_AREA, alpha=0.22, linewidth=0)
    axis.plot(times, rates, color=_AREA, linewidth=1.6)
    _style(axis, "output tokens/s", f"{summary.tokens_per_s:,.0f} in the mean")
    users = axis.twinx()
    users.step(
        times, [sample.users for sample in samples], where="pre", color=_USERS, linewidth=1.1, linestyle=":"
    )
    users.set_ylim(0, max(max((sample.users for sample in samples), default=1), 1) * 1.25)
    users.tick_params(labelsize=8.5, colors=_USERS, length=0)
    users.set_ylabel("users (dotted)", fontsize=8.5, color=_USERS)
    for spine in users.spines.values():
        spine.set_visible(False)


def _requests(axis: Any, samples: Sequence[Sample], summary: Summary) -> None:
    times = [sample.end_s for sample in samples]
    rates = [sample.requests / sample.seconds for sample in samples]
    axis.plot(times, rates, color=_AREA, linewidth=1.6, label="all")
    if summary.errors:
        errors = [sample.errors / sample.seconds for sample in samples]
        axis.fill_between(times, errors, color=_ERRORS, alpha=0.5, linewidth=0, label="failed")
        _legend(axis)
    text = f"{summary.requests_per_s:,.1f} in the mean, {summary.errors:,} of {summary.requests:,} failed"
    _style(axis, "requests/s", text)


def _latency(
    axis: Any,
    samples: Sequence[Sample],
    overall: Quantiles,
    heading: str,
    values: Callable[[Sample], Histogram],
) -> None:
    measured = [sample for sample in samples if values(sample)]
    times = [sample.end_s for sample in measured]
    for percent, style in _LINES.items():
        line = [percentile(values(sample), percent) for sample in measured]
        axis.plot(times, line, label=f"p{percent}", **style)
    _style(axis, heading, f"p50 {overall.p50:,.1f}   p95 {overall.p95:,.1f}   p99 {overall.p99:,.1f}")
    _legend(axis)


def _legend(axis: Any) -> None:
    """A legend, and room for it above the lines."""
    legend = axis.legend(loc="upper left", ncols=3, fontsize=8.5, frameon=False, handlelength=2.0)
    for text in legend.get_texts():
        text.set_color(_FAINT)
    axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.15)
