"""The history of a run as one self-contained page, which ``template.html`` draws from the JSON that is put into it."""

from __future__ import annotations

import html as escaping
import json
from importlib import resources

from spark_elastic._json import Json
from spark_elastic.timeline.history import Doing, History, WorkerLine
from spark_elastic.timeline.resets import Part
from spark_elastic.timeline.summary import clock, headline, reset_facts

# How many points of a metric are drawn. More would slow browsers down and could not be seen.
POINTS = 1000


def html(history: History) -> str:
    """Return the page."""
    template = resources.files("spark_elastic.timeline").joinpath("template.html").read_text(encoding="utf-8")
    # Text from a log, such as an error message, must not close the element that contains it.
    data = json.dumps(_facts(history)).replace("<", "\\u003c")
    title = escaping.escape(f"run {history.run_id}")
    return template.replace("{{title}}", title).replace("{{data}}", data)


def _facts(history: History) -> dict[str, Json]:
    return {
        "headline": headline(history),
        "failed": history.outcome != "finished",
        "seconds": history.seconds,
        "maxNp": history.max_np,
        "figures": _figures(history),
        "doings": [doing.value for doing in Doing],
        "parts": [part.value for part in Part],
        "workers": [_worker(line) for line in history.workers],
        "generations": [[g.generation, g.size, g.start, g.end] for g in history.generations],
        "resets": [{**reset_facts(reset), "noticed": reset.noticed, "end": reset.end} for reset in history.resets],
        "unit": history.unit,
        "speeds": [[speed.start, speed.end, speed.per_second] for speed in history.speeds],
        "metrics": {name: points[:: len(points) // POINTS + 1] for name, points in history.metrics.items()},
    }


def _figures(history: History) -> list[tuple[str, str]]:
    lost = sum(bool(line.cause) for line in history.workers)
    return [
        ("run time", clock(history.seconds)),
        ("to the first step", f"{history.trained_from:.1f} s"),
        (f"{history.unit} trained", f"{history.work:,}"),
        (f"{history.unit} a second", f"{history.per_second:,.{0 if history.per_second >= 10 else 1}f}"),
        ("workers started / lost", f"{len(history.workers)} / {lost}"),
        ("lost in resets", f"{history.seconds_lost:.2f} s"),
        ("committed steps lost", str(sum(reset.steps_lost for reset in history.resets))),
    ]


def _worker(line: WorkerLine) -> dict[str, Json]:
    return {
        "name": f"worker {line.worker}",
        "host": line.host,
        "cause": line.cause,
        "ranks": {str(generation): rank for generation, rank in line.ranks.items()},
        "spans": [[span.doing.value, span.start, span.end, span.generation] for span in line.spans],
    }
