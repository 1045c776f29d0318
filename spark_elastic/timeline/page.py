"""The history of a run as one self-contained page: a file to keep, a notebook cell's output, or a server's view of a running job.

``page.html`` is filled with ``page.css``, ``page.js``, and the facts as JSON, which the script draws. The page fetches nothing
from elsewhere, and its policy allows no other script: text from a log stays text.
"""

from __future__ import annotations

import base64
import hashlib
import html as escaping
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TypeVar

from spark_elastic._json import Json
from spark_elastic._plain import all_plain
from spark_elastic.errors import name_worker
from spark_elastic.timeline.follower import ALL_READ, Unread
from spark_elastic.timeline.history import Doing, History, RelievedWorker, SlowWorker, WorkerLine
from spark_elastic.timeline.resets import Part
from spark_elastic.timeline.start import Stage
from spark_elastic.timeline.summary import clock, headline, reset_facts, to_first_step

T = TypeVar("T")

# How many points are drawn of one metric, and of all together. More would slow down browsers and could not be seen.
POINTS = 1000
ALL_POINTS = 100_000


def html(history: History, unread: Unread = ALL_READ) -> str:
    """Return the page of a run as it is now."""
    return render(facts(history, unread))


def render(facts: dict[str, Json]) -> str:
    """Put facts into the page."""
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Text from a log, such as an error message, must not close the element that contains it.
    data = json.dumps(all_plain(facts), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "title": escaping.escape(str(all_plain(facts["title"]))),
        "script-hash": digest,
        "style": _part("page.css"),
        "data": data,
        "script": script,
    }
    page = _part("page.html")
    head, *rest = page.split("{{")
    filled = (piece.partition("}}") for piece in rest)
    return head + "".join(parts[name] + text for name, _, text in filled)


@cache
def _part(name: str) -> str:
    return resources.files("spark_elastic.timeline").joinpath(name).read_text(encoding="utf-8")


def waiting(sentence: str) -> dict[str, Json]:
    """Return the facts of a page that waits for a run."""
    return {"title": "waiting for a run", "waiting": sentence}


def facts(history: History, unread: Unread = ALL_READ, present: str = "is not over in this log") -> dict[str, Json]:
    """Return what the page shows, as plain data. ``present`` says what a run does that is not over."""
    points = min(POINTS, ALL_POINTS // max(len(history.metrics), 1))
    return {
        "title": f"run {history.run_id}",
        "headline": headline(history, present),
        "failed": history.has_failed,
        "isOver": history.is_over,
        "began": history.began,
        "seconds": history.seconds,
        "maxNp": history.max_np,
        "figures": _figures(history),
        "doings": [doing.value for doing in Doing],
        "parts": [part.value for part in Part],
        "stages": [stage.value for stage in Stage],
        "start": [[wait.stage.value, wait.start, wait.end, wait.detail] for wait in history.start],
        "workers": [_worker(line, len(history.workers)) for line in history.workers],
        "generations": [[g.generation, g.size, g.start, g.end] for g in history.generations],
        "resets": [{**reset_facts(reset), "noticed": reset.noticed, "end": reset.end} for reset in history.resets],
        "tooSlow": [slow.describe() for slow in history.too_slow],
        "slow": [_slow(slow) for slow in history.slow],
        "unit": history.unit,
        "speeds": [[speed.start, speed.end, speed.per_second] for speed in history.speeds],
        "metrics": {name: _thinned(values, points) for name, values in history.metrics.items()},
        "texts": history.texts,
        "words": _words(history),
        "unread": str(unread) if unread.count else "",
    }


def _thinned(values: Sequence[T], count: int) -> Sequence[T]:
    """Return about ``count`` evenly chosen points, and the newest in any case."""
    chosen = values[:: len(values) // max(count, 1) + 1]
    return chosen if chosen[-1:] == values[-1:] else [*chosen, values[-1]]


def _figures(history: History) -> list[tuple[str, str]]:
    lost = sum(bool(line.cause) for line in history.workers)
    return [
        ("run time", clock(history.seconds)),
        ("to the first step", to_first_step(history)),
        (f"{history.unit} trained", f"{history.work:,}"),
        (f"{history.unit} a second", f"{history.per_second:,.{0 if history.per_second >= 10 else 1}f}"),
        ("workers started / lost", f"{len(history.workers)} / {lost}"),
        ("lost in resets", f"{history.seconds_lost:.2f} s"),
        ("committed steps lost", str(sum(reset.steps_lost for reset in history.resets))),
    ]


def _worker(line: WorkerLine, workers: int) -> dict[str, Json]:
    samples = [(sample.time, sample.cpu_seconds, sample.memory) for sample in line.samples]
    gpu = [(time, used.memory, used.utilization) for time, used in line.gpu]
    points = min(POINTS, ALL_POINTS // workers)
    return {
        "name": f"worker {line.worker}",
        "host": line.host,
        "cause": line.cause,
        "ranks": {str(generation): rank for generation, rank in line.ranks.items()},
        "samples": _thinned(samples, points),
        "gpu": _thinned(gpu, points),
        "spans": [[span.doing.value, span.start, span.end, span.generation] for span in line.spans],
    }


def _words(history: History) -> list[tuple[str, str]]:
    """Return titles and texts of what went wrong and of what workers have printed. An error of several ranks is shown once."""
    found = [("Why the run failed", history.failure)] if history.failure else []
    shown: dict[str, str] = {}
    for line in history.workers:
        rank = line.ranks[max(line.ranks)] if line.ranks else None
        name = f"{name_worker(line.worker, rank)} on {line.host}"
        if line.traceback:
            first = shown.setdefault(line.traceback, name)
            text = line.traceback if first == name else f"the same as {first}"
            found.append((f"{name}: raised", text))
        if line.last_lines:
            found.append((f"{name}: its last lines", "\n".join(line.last_lines)))
    return found


def _slow(slow: SlowWorker) -> dict[str, Json]:
    return {
        "worker": slow.worker,
        "rank": slow.rank,
        "host": slow.host,
        "at": slow.at,
        "times_as_long": slow.times,
        "part": f"{slow.part} of {slow.of} {slow.unit}" if isinstance(slow, RelievedWorker) else "an even one",
        "sentence": str(slow),
    }
