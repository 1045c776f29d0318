"""The figures of a run, for people and for programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import story
from story import entries

from spark_elastic.cli import main
from spark_elastic.timeline.history import History, read_history
from spark_elastic.timeline.page import facts, html
from spark_elastic.timeline.resets import Kind
from spark_elastic.timeline.summary import clock, headline, summarize, summary_text


def test_the_figures_add_up(history: History) -> None:
    facts = summarize(history)
    assert facts["availability"] == pytest.approx(1 - 1.2 / 17, abs=1e-5)
    assert (facts["rows_done"], facts["rows_per_second"]) == (2000, pytest.approx(2000 / 17, abs=1e-3))
    assert (facts["steps"], facts["steps_lost"], facts["workers"], facts["workers_lost"]) == (200, 0, 3, 1)
    assert [reset["seconds_lost"] for reset in facts["resets"]] == [0.7, 0.5]


def test_the_headline_says_how_it_went(history: History) -> None:
    assert (
        headline(history)
        == "The run finished. It trained 92.9% of the time from its first step on, through 1 failure and 1 arrival."
    )


def test_a_run_that_never_trained_is_told_as_well() -> None:
    start, *_ = story.killed()
    history = read_history(entries([start, story.event("job_failed", 5, error="NotEnoughHostsError", message="none")]))
    assert "NotEnoughHostsError" in headline(history)
    assert "NotEnoughHostsError" in summary_text(history)
    assert "NotEnoughHostsError" in html(history)
    facts = summarize(history)
    assert (facts["seconds_to_first_step"], facts["availability"], facts["steps"]) == (None, None, 0)
    assert "– to the first step" in summary_text(history)
    assert "no step was made" in summary_text(history)
    assert "trained" not in headline(history)


def test_summary_prints_the_figures(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(log)]) == 0
    text = capsys.readouterr().out
    assert "availability 92.94%: 1.20 s lost in 2 resets, 0 committed steps lost" in text
    assert re.search(r"0:10\.\d +rank 1 on west was lost: killed by SIGKILL +2 → 1 +0\.700", text)


def test_times_are_rounded_before_they_are_divided_into_minutes_and_seconds() -> None:
    assert [clock(seconds) for seconds in (59.94, 59.97, 62.5, 3599.97)] == ["0:59.9", "1:00.0", "1:02.5", "1:00:00.0"]


def test_the_summary_names_the_slow_host_and_what_it_came_to_take() -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "fault_injected")
    changes = [
        story.told("shares_changed", 4.0, 0, 0, 1, step=9, before=[50, 50], after=[69, 31], seconds=[0.1, 0.3]),
        story.told("shares_changed", 6.0, 0, 0, 1, step=99, before=[69, 31], after=[74, 26], seconds=[0.14, 0.19]),
    ]
    found = read_history(entries([*events[:place], *changes, *events[place:]]))
    sentence = "rank 1 (worker 1) on west was slow: 3.0 times as long for a row as the fastest; "
    sentence += "it came to take 26 of 100 rows a step"
    assert sentence in summary_text(found)
    assert sentence[0].upper() + sentence[1:] in headline(found)
    assert summarize(found)["slow_workers"] == [
        {"worker": 1, "rank": 1, "host": "west", "at": 6.0, "times_as_long": 3.0, "rows_a_step": 26, "of": 100}
    ]


def test_the_summary_names_the_host_of_a_slow_worker_that_kept_its_rows() -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "fault_injected")
    slow = {"event": "worker_slow", "worker": 1, "rank": 1, "host": "west", "times": 3.04}
    found = read_history(entries([*events[:place], {**events[place], **slow}, *events[place:]]))
    sentence = "rank 1 (worker 1) on west was slow: 3.0 times as long for a row as the others, which waited for it in every step"
    assert sentence in summary_text(found)
    assert sentence[0].upper() + sentence[1:] in headline(found)
    (told,) = summarize(found)["slow_workers"]
    del told["at"]
    assert told == {"worker": 1, "rank": 1, "host": "west", "times_as_long": 3.04}
    assert facts(found)["slow"][0]["part"] == "an even one"


def test_the_summary_names_the_host_of_a_worker_that_was_too_slow() -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "fault_injected")
    slow = {"event": "worker_too_slow", "worker": 1, "rank": 1, "host": "west", "times": 12.5, "seconds": 60.0}
    found = read_history(entries([*events[:place], {**events[place], **slow}, *events[place:]]))
    sentence = (
        "rank 1 (worker 1) on west is too slow: a row takes it 12.5 times as long as the median of the other ranks; "
    )
    sentence += "it is replaced, and its executor gets no worker for 60 s"
    assert sentence in summary_text(found)
    assert sentence[0].upper() + sentence[1:] in headline(found)
    assert summarize(found)["too_slow_workers"] == [
        {"worker": 1, "rank": 1, "host": "west", "times_as_long": 12.5, "replaced": True}
    ]


def test_the_summary_tells_how_many_workers_train_and_why() -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "world_interrupted")
    sized = {"event": "world_sized", "size": 2, "tried": False, "sizes": [3, 2], "rows_per_second": [1000.0, 2000.0]}
    interrupted = {**events[place], "reason": "2 workers are to train"}
    told = [*events[:place], {**events[place], **sized}, interrupted, *events[place + 1 :]]
    found = read_history(entries(told))
    assert [reset.kind for reset in found.resets] == [Kind.LOSS, Kind.SHRINK]
    sentence = "2 of 3 workers train from here on, because more are not faster: 3 trained 1,000 rows/s"
    assert sentence in summary_text(found)
    assert sentence in headline(found)
    assert "through 1 failure and 1 change to fewer workers." in headline(found)
    assert summarize(found)["sizes"] == [{"size": 2, "tried": False, "rows_per_second": {"3": 1000.0, "2": 2000.0}}]


def test_nobody_is_slow_where_shares_have_not_changed(history: History) -> None:
    assert history.slow == []
    assert "slow" not in summary_text(history)
