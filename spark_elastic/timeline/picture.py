"""The history of a run as a picture, for reports. Needs matplotlib."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from spark_elastic._plain import plain
from spark_elastic.timeline.history import Doing, History
from spark_elastic.timeline.resets import Kind
from spark_elastic.timeline.summary import headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    Doing.BOOTING: "#9db2c9",
    Doing.PREPARING: "#bccbdc",
    Doing.WAITING: "#e3c567",
    Doing.SYNCING: "#e8923a",
    Doing.TRAINING: "#4c9f70",
    Doing.LEAVING: "#d1495b",
    Doing.FINISHING: "#7a6fb0",
}

# Larger numbers are drawn as this one: matplotlib computes sums of what it draws, which must be numbers, too.
LARGEST = 1e300
METRICS_DRAWN = 3
# Metrics that are not drawn where a loader's rows are counted.
OF_LOADERS = {"epoch", "rows"}
# The time axis of a log whose events all have the same time.
SHORTEST_SECONDS = 1e-3


def save(history: History, path: Path) -> None:
    """Draw workers, world size, speed and metrics over time into a file. Raises ``ImportError`` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'spark-elastic[pictures]', or write .html") from error
    named = (each for each in history.metrics.items() if history.unit != "rows" or each[0] not in OF_LOADERS)
    metrics = list(named)[:METRICS_DRAWN]
    heights = [0.6 + 0.28 * len(history.workers), 1.0, 1.4, *[1.4 for _ in metrics]]
    figure = Figure(figsize=(11, sum(heights) + 1), layout="constrained")
    figure.suptitle(plain(headline(history)), parse_math=False)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _draw_workers(axes[0], history)
    edges = [(g.start, g.end, g.size) for g in history.generations]
    axes[1].bar(
        [e[0] for e in edges], [e[2] for e in edges], [e[1] - e[0] for e in edges], align="edge", color="#8fb0d6"
    )
    axes[1].set(ylabel="workers", ylim=(0, history.max_np * 1.1))
    speeds = history.speeds
    axes[2].bar(
        [s.start for s in speeds],
        [s.per_second for s in speeds],
        [s.end - s.start for s in speeds],
        align="edge",
        color="#4c9f70",
    )
    axes[2].set_ylabel(f"{history.unit}/s")
    for place, (name, points) in zip(axes[3:], metrics, strict=True):
        values = [max(-LARGEST, min(value, LARGEST)) for _, value in points]
        place.plot([time for time, _ in points], values, linewidth=1)
        place.set_ylabel(plain(name), parse_math=False)
    for place in axes:
        for reset in history.resets:
            place.axvline(
                reset.noticed, color="#c62828" if reset.kind is Kind.LOSS else "#2e7d32", linestyle=":", linewidth=1
            )
    axes[-1].set(xlabel="seconds since the run began", xlim=(0, max(history.seconds, SHORTEST_SECONDS)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # of a script that the font lacks: drawn as boxes
        figure.savefig(path, dpi=120)


def _draw_workers(axes: Axes, history: History) -> None:
    for row, line in enumerate(history.workers):
        for doing, color in COLORS.items():
            spans = [(span.start, span.end - span.start) for span in line.spans if span.doing is doing]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=color, label=doing.value if row == 0 else None)
        if line.cause and line.spans:
            axes.plot(line.spans[-1].end, row, "x", color="#c62828")
    axes.set_yticks(range(len(history.workers)), [f"worker {line.worker}" for line in history.workers])
    axes.invert_yaxis()
    if history.workers:
        axes.legend(ncols=len(COLORS), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize="small")
