"""Draws docs/reset.svg from an event log: the first loss in it, and the join that follows, a row for each worker.

make demo
python docs/make_reset_picture.py demo-output/events.jsonl docs/reset.svg
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from spark_elastic.timeline.event_log import choose_run, read_events
from spark_elastic.timeline.history import History, read_history
from spark_elastic.timeline.picture import COLORS
from spark_elastic.timeline.resets import Kind, Reset

MARGIN = 0.06  # seconds that are shown before the loss and after the join
LEFT, WIDTH, ROW, TOP = 90, 890, 34, 62


def find(history: History) -> tuple[Reset, Reset]:
    """The first loss that a join follows. Raises ValueError where there is none."""
    for first, second in pairwise(history.resets):
        if (first.kind, second.kind) == (Kind.LOSS, Kind.JOIN):
            return first, second
    raise ValueError(f"run {history.run_id} has no loss that a join follows")


def draw(history: History) -> str:
    """The picture as SVG."""
    loss, join = find(history)
    start, end = loss.begin - MARGIN, join.end + MARGIN
    lines = [line for line in history.workers if any(span.end > start and span.start < end for span in line.spans)]
    shown = {span.doing for line in lines for span in line.spans if span.end > start and span.start < end}
    bottom = TOP + ROW * len(lines)
    size = f"{LEFT + WIDTH + 30} {bottom + 30}"

    def x(moment: float) -> float:
        return round(LEFT + WIDTH * (min(max(moment, start), end) - start) / (end - start), 1)

    def text(left: float, top: float, words: str, anchor: str = "middle", color: str = "#222") -> str:
        return f'<text x="{left:.1f}" y="{top}" text-anchor="{anchor}" fill="{color}">{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for place, (doing, color) in enumerate((doing, color) for doing, color in COLORS.items() if doing in shown):
        left = LEFT + 175 * place
        parts += [
            f'<rect x="{left}" y="8" width="12" height="12" fill="{color}"/>',
            text(left + 18, 19, doing.value, "start"),
        ]
    for row, line in enumerate(lines):
        top = TOP + ROW * row
        parts.append(text(LEFT - 10, top + 21, f"worker {line.worker}", "end"))
        for span in line.spans:
            width = x(span.end) - x(span.start)
            if width > 0:
                box = f'x="{x(span.start)}" y="{top + 5}" width="{width:.1f}" height="{ROW - 10}"'
                parts.append(f'<rect {box} fill="{COLORS[span.doing]}"/>')
        if line.spans and line.spans[-1].end < loss.end:
            parts.append(text(x(line.spans[-1].end) + 5, top + 22, "✗ killed", "start", "#c62828"))
    for begin, finish, what in ((loss.begin, loss.end, "loss"), (join.begin, join.end, "join")):
        for moment in (begin, finish):
            parts.append(f'<path d="M{x(moment)} {TOP - 4}V{bottom + 6}" stroke="#222" stroke-dasharray="2 3"/>')
        words = f"{what}: {1000 * (finish - begin):.0f} ms"
        parts.append(text((x(begin) + x(finish)) / 2, TOP - 12, words))
        parts.append(text(x(begin), bottom + 22, f"{begin - loss.begin:.2f} s"))
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    log, picture = sys.argv[1:]
    Path(picture).write_text(draw(read_history(choose_run(read_events(log)))), encoding="utf-8")
