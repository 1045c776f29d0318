"""What the event log tells: resets taken apart, figures, and the commands that show them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import story
from story import entries

from spark_elastic.cli import main
from spark_elastic.driver.joining import InterruptCause
from spark_elastic.protocol import records
from spark_elastic.protocol.records import Entry
from spark_elastic.timeline.event_log import choose_run, read_events
from spark_elastic.timeline.history import History, read_history
from spark_elastic.timeline.page import facts, html
from spark_elastic.timeline.resets import Kind, Part, find_resets
from spark_elastic.timeline.summary import clock, headline, summarize, summary_text


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in story.killed()))
    return path


# ---------------------------------------------------------------- resets


def test_a_loss_is_taken_apart_from_the_fault_to_the_first_step() -> None:
    loss = find_resets(entries(story.killed()))[0]
    assert (loss.kind, loss.old_size, loss.new_size, loss.victim) == (Kind.LOSS, 2, 1, 1)
    assert loss.parts == {
        Part.DETECT: 0.05,
        Part.ABORT: 0.2,
        Part.REGROUP: 0.1,
        Part.CONNECT: 0.1,
        Part.SYNC: 0.2,
        Part.STEP: 0.2,
    }
    assert (loss.lost, loss.steps_lost) == (0.7, 0)


def test_where_no_fault_was_injected_a_loss_begins_at_the_survivors_last_commit() -> None:
    events = [event for event in story.killed() if event["event"] != "fault_injected"]
    assert find_resets(entries(events))[0].parts[Part.DETECT] == pytest.approx(0.1)


def test_a_join_begins_when_those_who_train_have_committed_and_waits_for_no_newcomers_sync() -> None:
    join = find_resets(entries(story.killed()))[1]
    assert (join.kind, join.lost) == (Kind.JOIN, 0.5)
    assert join.parts[Part.DETECT] == 0
    assert join.parts[Part.ABORT] == pytest.approx(0.1)
    assert join.parts[Part.SYNC] == pytest.approx(0.2)


def test_a_world_that_breaks_before_it_trains_belongs_to_the_reset_before() -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "entered" and event["generation"] == 2)
    again = [
        story.event("world_broken", 10.45, generation=2, reason="rank 0 did not connect"),
        story.ready(10.46, 0, 2, "1.69"),
    ]
    later = [{**event, "generation": 3} if event.get("generation") == 2 else event for event in events[place:]]
    later = [event for event in later if event["event"] in ("entered", "stepped")][:2]
    found = find_resets(entries([*events[:place], *again, *story.world(10.5, 3, [0], 2, "1.69"), *later]))
    assert [(reset.generation, reset.new_generation) for reset in found] == [(1, 3)]


def test_a_first_step_that_is_noted_before_its_world_has_formed_loses_nothing() -> None:
    """The last rank's word that it has connected may come after the first step of another one."""
    events = story.killed()
    in_order = find_resets(entries(events))
    for loss in (2, 3):
        (formed,) = [event for event in events if event["event"] == "world_formed" and event["generation"] == loss]
        events.remove(formed)
        stepped = next(n for n, e in enumerate(events) if e["event"] == "stepped" and e["generation"] == loss)
        events.insert(stepped + 1, formed)
    assert find_resets(entries(events)) == in_order


def test_a_drain_that_turns_into_a_failure_is_a_loss() -> None:
    events = story.killed()
    broken = next(n for n, event in enumerate(events) if event["event"] == "world_broken")
    drain = story.event("world_interrupted", 9.96, generation=1, reason="a host drains")
    assert find_resets(entries([*events[:broken], drain, *events[broken:]]))[0].kind is Kind.LOSS


def test_a_first_step_that_comes_after_the_interruption_of_its_world_ends_no_reset() -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "stepped" and event["generation"] == 3)
    arrived = story.event("world_interrupted", 15.05, generation=3, reason="workers arrived")
    last = find_resets(entries([*events[:place], arrived, *events[place:]]))[-1]
    assert (last.generation, last.new_generation) == (3, None)


def test_commits_that_nobody_holds_any_more_are_steps_lost() -> None:
    """All workers were lost, and the durable checkpoint is older than what they had."""
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "entered" and event["generation"] == 2)
    restored = story.told("entered", 10.6, 2, 0, 2, step=50)
    stepped = story.told("stepped", 10.8, 2, 0, 2, step=51)
    kept = [event for event in events[:place] if not (event["event"] == "worker_ready" and event["generation"] == 1)]
    found = find_resets(entries([*kept, restored, stepped]))[0]
    assert (found.steps_lost, found.lost) == (19, None)


def test_commits_lost_once_are_not_lost_again_by_the_next_reset() -> None:
    """After the fall back to step 50, a newcomer joins before the old step has been reached again."""
    events = [event for event in story.killed() if event["event"] not in ("progress", "metrics")]
    for event in events:
        if event["event"] in ("entered", "stepped") and event["generation"] > 1:
            event["values"]["step"] -= 19
        if event["event"] == "worker_ready" and event["generation"] == 1:
            event["commit"] = None
    place = next(n for n, event in enumerate(events) if event["event"] == "fault_injected")
    found = find_resets(entries([*events[:place], story.rows(9.9, 1, 69), *events[place:]]))
    assert [reset.steps_lost for reset in found] == [19, 0]


def test_a_fault_explains_one_loss() -> None:
    events = story.killed()
    again = [
        story.event("world_broken", 10.9, generation=2, reason="rank 0 on east was lost: its process died"),
        *story.world(11.0, 3, [2], 2, None),
        story.told("entered", 11.1, 2, 0, 3, step=70, idle=0.3),
        story.told("stepped", 11.2, 2, 0, 3, step=71),
    ]
    place = next(n for n, event in enumerate(events) if event["event"] == "world_interrupted")
    first, second = find_resets(entries([*events[:place], *again]))
    assert (first.victim, second.victim) == (1, None)
    assert second.begin == pytest.approx(1010.8)


def test_rows_add_up_where_a_loader_is_set_back_to_an_earlier_epoch() -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "world_finished")
    back = story.told("progress", 19.9, 0, 0, 3, step=240, epoch=0, rows=400, rows_total=1000)
    facts = summarize(read_history(entries([*events[:place], back, *events[place:]])))
    assert facts["rows_done"] == 2000 + 400


def test_a_run_that_ends_in_a_reset_shows_that_it_did_not_go_on() -> None:
    events = story.killed()
    broken = next(n for n, event in enumerate(events) if event["event"] == "world_broken")
    failed = story.event("job_failed", 12, error="NotEnoughHostsError", message="only 1 of 2")
    history = read_history(entries([*events[: broken + 1], failed]))
    assert [reset.new_generation for reset in history.resets] == [None]
    assert history.outcome == "failed: NotEnoughHostsError: only 1 of 2"
    assert "did not go on" in summary_text(history)


# ---------------------------------------------------------------- figures


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


def test_a_reset_tells_why_its_workers_were_lost_where_survivors_noticed_something_else_first() -> None:
    events = story.killed()
    broken = next(event for event in events if event["event"] == "world_broken")
    broken["reason"] = "rank 0 reports: Connection closed by peer\nand a trace"
    (reset, _) = read_history(entries(events)).resets
    assert reset.reason == "rank 1 on west was lost: killed by SIGKILL"
    unexplained = [event for event in events if event["event"] != "worker_exited"]
    assert read_history(entries(unexplained)).resets[0].reason == "rank 1 on west was lost: its process died"
    nobody = read_history(
        entries([event for event in events if event["event"] not in ("worker_lost", "worker_exited")])
    )
    assert nobody.resets[0].reason == broken["reason"]
    assert "  rank 0 reports: Connection closed by peer  2 → 1 " in summary_text(nobody)


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("name", ["out.html", "out.png"])
def test_timeline_writes_what_the_name_says(name: str, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = log.parent / name
    assert main(["timeline", str(log), "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(output)
    assert output.read_bytes()[:4] == (b"\x89PNG" if name.endswith("png") else b"<!DO")


def test_summary_prints_the_figures(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(log)]) == 0
    text = capsys.readouterr().out
    assert "availability 92.94%: 1.20 s lost in 2 resets, 0 committed steps lost" in text
    assert re.search(r"0:10\.\d +rank 1 on west was lost: killed by SIGKILL +2 → 1 +0\.700", text)


def test_times_are_rounded_before_they_are_divided_into_minutes_and_seconds() -> None:
    assert [clock(seconds) for seconds in (59.94, 59.97, 62.5, 3599.97)] == ["0:59.9", "1:00.0", "1:02.5", "1:00:00.0"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no run"),
        ("hello\n", "line 1: not an event"),
        ('{"version": 99, "time": 0, "event": "job_started"}\n', "has version 99"),
        ('{"version": 1, "time": 0, "event": "driver_paused", "seconds": 1}\n', "holds no run"),
        ('{"version": 1, "time": 0, "event": "driver_paused"}\n', "line 1: no event of spark_elastic: Object missing"),
    ],
)
def test_what_is_no_event_log_is_refused(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(text)
    assert main(["summary", str(tmp_path / "log")]) == 2
    assert complaint in capsys.readouterr().err


def test_the_log_of_a_driver_that_was_killed_is_read_up_to_the_line_that_was_cut(log: Path) -> None:
    log.write_text(log.read_text()[:-30])
    assert read_history(choose_run(read_events(log))).outcome == "is not over in this log"


def test_of_a_log_with_several_runs_the_last_one_is_shown_or_the_one_that_is_named(log: Path) -> None:
    log.write_text(log.read_text() + log.read_text().replace("abcd", "efgh"))
    events = read_events(log)
    assert _run_id(choose_run(events)) == "efgh"
    assert _run_id(choose_run(events, "abcd")) == "abcd"
    with pytest.raises(ValueError, match="abcd, efgh"):
        choose_run(events, "other")


def _run_id(entries: list[Entry]) -> str:
    assert isinstance(entries[0].record, records.JobStarted)
    return entries[0].record.run_id


# ---------------------------------------------------------------- events of other releases


def test_an_event_without_a_field_that_it_always_had_is_refused_by_its_line(tmp_path: Path) -> None:
    lines = [json.dumps(event) for event in story.killed()]
    lines[1] = json.dumps({"version": 1, "time": 1001.0, "event": "worker_starting", "worker": 0})
    (tmp_path / "log").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"line 2: .* missing required field `host`"):
        read_events(tmp_path / "log")


# ---------------------------------------------------------------- slow workers


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


@pytest.mark.parametrize("cause", InterruptCause)
def test_a_planned_end_is_of_the_kind_that_the_driver_has_recorded(cause: InterruptCause) -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "world_interrupted")
    events[place] = {**events[place], "reason": "in other words", "cause": cause.value}
    assert [reset.kind for reset in read_history(entries(events)).resets] == [Kind.LOSS, Kind(cause.value)]


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
