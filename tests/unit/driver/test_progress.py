"""The progress line: what it says."""

from __future__ import annotations

from shown_entries import START, entry, reported, rows

from spark_elastic.driver.progress import JobView
from spark_elastic.protocol.records import (
    Entry,
    HostLost,
    HostRegistered,
    Record,
    WorkerLost,
    WorkerReady,
    WorkerReported,
    WorkerStarted,
    WorkerStarting,
    WorldBroken,
)
from spark_elastic.protocol.reports import Entered, Metrics, Progress


def view(*entries: Entry) -> JobView:
    seen = JobView()
    for each in entries:
        seen.see(each)
    return seen


def test_before_the_first_world_the_line_tells_what_is_waited_for() -> None:
    steps: list[tuple[Record, str]] = [
        (START[0].record, "starting: 2 wait for slots"),
        (HostRegistered(0, 0, "a"), "starting: 1 waits for a slot"),
        (WorkerStarting(0, 0, "a"), "starting: 1 waits for a slot, 1 imports torch"),
        (WorkerStarted(0, 0, 17), "starting: 1 waits for a slot, 1 runs the function's first lines"),
        (HostRegistered(1, 1, "b"), "starting: 1 runs the function's first lines"),
        (WorkerStarting(1, 1, "b"), "starting: 1 imports torch, 1 runs the function's first lines"),
        (WorkerReady(0, 0, None), "1 of 2 workers ready: 1 imports torch"),
        (WorkerLost(1, None, "b", "it was killed"), "1 of 2 workers ready"),
        (HostLost(1, "b", "gone"), "1 of 2 workers ready: 1 waits for a slot"),
    ]
    seen = JobView()
    assert seen.tail == "starting"
    for record, line in steps:
        seen.see(entry(record))
        assert seen.tail == line


def test_the_line_tells_rows_speed_world_resets_metrics_and_time_left() -> None:
    loss = reported(Metrics({"step": 3, "loss": 0.51234}))
    shown = view(*START, rows(10, 2, 200), loss, rows(12, 2, 400))
    assert (shown.head, shown.share) == ("epoch 2  40%", 0.4)
    assert shown.tail == (
        "400/1,000 rows, 100 rows/s, 2/4 workers, generation 1, 0 resets, loss 0.5123, 0:06 left in epoch"
    )


def test_other_ranks_metrics_are_not_mixed_in() -> None:
    assert "loss" not in view(*START, reported(Metrics({"step": 3, "loss": 0.5}), rank=1)).tail


def test_names_and_texts_of_metrics_take_little_of_the_line_and_do_not_end_it() -> None:
    odd: dict[str, float | int | str] = {"step": 3, "a\nname": "two\r\n\x1b[2Jlines", "long": 50 * "x", 50 * "y": 1.0}
    tail = view(*START, reported(Metrics(odd))).tail
    assert tail.endswith(f", a name two lines, long {39 * 'x'}…, {39 * 'y'}… 1")


def test_metrics_named_epoch_and_rows_are_shown_where_no_loader_tells_them() -> None:
    mine = reported(Metrics({"step": 3, "epoch": 7, "rows": 900}))
    assert view(*START, mine).tail.endswith("epoch 7, rows 900")
    assert "900" not in view(*START, mine, rows(10, 2, 200)).tail


def test_while_it_recovers_the_line_says_why_and_no_speed() -> None:
    shown = view(*START, rows(10, 0, 200), rows(12, 0, 400), entry(WorldBroken(1, "rank 1 was lost")))
    assert shown.tail == "recovering: rank 1 was lost, 400/1,000 rows, 2/4 workers, generation 1, 1 reset"


def test_the_speed_after_a_reset_leaves_the_pause_out() -> None:
    again = [entry(WorldBroken(1, "x"), 12), reported(Entered(1), 20), rows(20, 0, 400), rows(21, 0, 500)]
    assert view(*START, rows(10, 0, 200), rows(12, 0, 400), *again).speed == 100


def test_the_speed_begins_anew_where_a_loader_is_set_back_to_an_earlier_epoch() -> None:
    view = JobView()
    for time, report in (
        (1.0, Progress(10, 1, 500, 1000)),
        (2.0, Progress(20, 0, 100, 1000)),
        (3.0, Progress(30, 0, 300, 1000)),
    ):
        view.see(Entry(time, WorkerReported(0, 0, 1, report)))
        assert view.speed is None or time == 3.0
    assert view.speed == 200.0


def test_the_end_of_the_last_epoch_is_no_beginning_of_another() -> None:
    assert view(*START, rows(10, 4, 900), rows(12, 5, 0)).head == "epoch 4 100%"


def test_without_rows_the_line_counts_steps() -> None:
    steps = [reported(Progress(step), time) for time, step in ((1, 10), (2, 15))]
    shown = view(*START, *steps)
    assert (shown.head, shown.share) == ("step 15", None)
    assert "5.0 steps/s" in shown.tail
