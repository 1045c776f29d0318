"""The page of a run: it is self-contained, shows text as text, and draws no more than a browser can."""

from __future__ import annotations

import json
import re

import story
from story import entries, sampled

from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.page import facts, html


def test_the_page_is_self_contained_and_no_text_of_the_log_is_code() -> None:
    events = story.killed()
    for event in events:
        if event["event"] == "worker_exited":
            event["meaning"] = "</script><script>alert(1)</script>"
    page = html(read_history(entries(events)))
    assert not re.search(r'(src|href)="|@import|url\(', page)
    assert "<script>alert" not in page
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["resets"][0]["reason"].endswith("was lost: </script><script>alert(1)</script>")


def test_what_a_worker_has_used_of_its_gpu_is_in_its_line_and_on_the_page() -> None:
    used = [
        story.told("gpu_used", 4, 0, 0, 1, memory=2**30, utilization=93),
        story.told("gpu_used", 9, 0, 0, 1, memory=2**31),
    ]
    first, second, *_ = facts(read_history(entries([*story.killed()[:15], *used, *story.killed()[15:]])))["workers"]
    assert (first["gpu"], second["gpu"]) == ([(4, 2**30, 93), (9, 2**31, None)], [])


def test_the_page_has_each_traceback_once_and_the_last_lines_of_each_worker() -> None:
    raised = [
        story.event("worker_raised", 9.9, worker=worker, rank=worker, error="ValueError: x", traceback="Traceback …")
        for worker in (0, 1)
    ]
    events = [*story.killed()[:15], sampled(4, 0, 1.5, "hello", "again"), *raised]
    failed = story.event("job_failed", 12, error="TrainingFailedError", message="all failed")
    assert facts(read_history(entries([*events, failed])))["words"] == [
        ("Why the run failed", "all failed"),
        ("rank 0 (worker 0) on east: raised", "Traceback …"),
        ("rank 0 (worker 0) on east: its last lines", "hello\nagain"),
        ("rank 1 (worker 1) on west: raised", "the same as rank 0 (worker 0) on east"),
    ]


def test_of_long_runs_about_a_thousand_points_are_drawn_and_the_newest_always() -> None:
    events = story.killed()[:15]
    events += [story.told("metrics", 4 + n, 0, 0, 1, step=n, loss=float(n)) for n in range(5000)]
    events += [sampled(4 + n, 0, float(n)) for n in range(5001)]
    told = facts(read_history(entries(events)))
    for points, newest in (
        (told["metrics"]["loss"], (5003, 4999.0)),
        (told["workers"][0]["samples"], (5004, 5000.0, 2**30)),
    ):
        assert 500 < len(points) <= 1002
        assert points[-1] == newest
