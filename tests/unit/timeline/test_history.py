"""The history of a run: lives of workers, generations, metrics, and what workers have used and said."""

from __future__ import annotations

import story
from story import entries, sampled

from spark_elastic.timeline.history import Doing, History, Sample, read_history
from spark_elastic.timeline.summary import summarize


def test_a_workers_life_is_told_without_gaps(history: History) -> None:
    line = history.workers[0]
    assert [span.doing for span in line.spans][:6] == [
        Doing.BOOTING,
        Doing.WAITING,
        Doing.SYNCING,
        Doing.TRAINING,
        Doing.LEAVING,
        Doing.WAITING,
    ]
    ends = [span.end for span in line.spans]
    assert [span.start for span in line.spans][1:] == ends[:-1]
    assert line.ranks == {1: 0, 2: 0, 3: 0}


def test_a_lost_workers_life_ends_with_the_cause(history: History) -> None:
    line = history.workers[1]
    assert (line.spans[-1].doing, line.spans[-1].end) == (Doing.TRAINING, 10.0)
    assert line.cause == "killed by SIGKILL", "which its exit told after its loss"


def test_a_generation_lasts_until_it_breaks_or_the_next_one_forms(history: History) -> None:
    assert [(g.generation, g.size, round(g.start, 3), round(g.end, 3)) for g in history.generations] == [
        (1, 2, 2.7, 10.0),
        (2, 1, 10.4, 14.6),
        (3, 2, 14.7, 19.9),
    ]


def test_metrics_are_rank_0s_numbers(history: History) -> None:
    assert {name: [value for _, value in points] for name, points in history.metrics.items()} == {"loss": [0.5]}


def test_metrics_may_have_the_names_of_a_loaders_facts() -> None:
    """They were left out where no loader told them either."""
    events = story.killed()
    (mine,) = (event for event in events if event["event"] == "metrics" and event["rank"] == 0)
    mine["values"] |= {"epoch": 3, "rows": 900}
    assert read_history(entries(events)).metrics.keys() == {"loss", "epoch", "rows"}


def test_a_function_without_an_elastic_part_is_shown_at_work() -> None:
    started = story.killed()[:2]
    ended = [story.event("result_arrived", 9, worker=0), story.event("job_finished", 9, workers=[0], resets=0)]
    (line,) = read_history(entries([*started, *ended])).workers
    assert [(span.doing, span.start, span.end) for span in line.spans] == [(Doing.TRAINING, 1, 9)]


def test_a_run_that_failed_before_it_reported_progress_has_the_steps_that_were_told() -> None:
    events = [event for event in story.killed() if event["event"] != "progress"]
    assert read_history(entries(events)).steps == 106


def test_kinds_and_fields_that_a_later_release_adds_are_passed_over() -> None:
    events = story.killed()
    later = [story.event("quorum_reached", 1, worker=7, quorum=2), *({**event, "later": 1} for event in events[1:])]
    assert read_history(entries([events[0], *later])) == read_history(entries(events))


def test_logs_from_before_an_exit_said_what_it_explains_are_read_as_then() -> None:
    old = [{name: value for name, value in event.items() if name != "explains"} for event in story.killed()]
    assert [line.cause for line in read_history(entries(old)).workers] == [
        line.cause for line in read_history(entries(story.killed())).workers
    ]


def test_what_workers_have_used_said_and_raised_is_in_their_lines() -> None:
    raised = story.event("worker_raised", 9.9, worker=1, rank=1, error="ValueError: x", traceback="Traceback …")
    events = [sampled(4, 0, 1.5, "hello"), sampled(5, 1, 2.0, "world"), sampled(9, 0, 6.5), raised]
    exited = [
        {**event, "last_lines": ["goodbye"]} if event["event"] == "worker_exited" else event for event in story.killed()
    ]
    first, second, _ = read_history(entries([*exited[:15], *events, *exited[15:]])).workers
    assert first.samples == [Sample(4, 1.5, 2**30), Sample(9, 6.5, 2**30)]
    assert (first.last_lines, first.traceback) == (["hello"], "")
    assert (second.last_lines, second.traceback) == (["goodbye"], "Traceback …")


def test_rows_add_up_where_a_loader_is_set_back_to_an_earlier_epoch() -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "world_finished")
    back = story.told("progress", 19.9, 0, 0, 3, step=240, epoch=0, rows=400, rows_total=1000)
    facts = summarize(read_history(entries([*events[:place], back, *events[place:]])))
    assert facts["rows_done"] == 2000 + 400
