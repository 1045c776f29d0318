"""Reports of workers: what they come to, what they say, and what makes no sense."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from spark_elastic.protocol.event_format import read_event
from spark_elastic.protocol.reports import REPORTS, Progress, Report, SharesChanged, kind_of


@pytest.mark.parametrize(
    "change", [{"after": [100]}, {"before": [], "after": [], "seconds": []}, {"seconds": [0.0, 1.0]}]
)
def test_a_change_of_shares_that_makes_no_sense_is_no_event(change: dict[str, Any]) -> None:
    values = {"step": 9, "before": [50, 50], "after": [69, 31], "seconds": [0.1, 0.3], **change}
    event = {
        "version": 1,
        "time": 1.0,
        "event": "shares_changed",
        "worker": 0,
        "rank": 0,
        "generation": 1,
        "values": values,
    }
    with pytest.raises(ValueError, match=r"for each rank|are positive"):
        read_event(event)


@pytest.mark.parametrize(
    ("name", "kind"), [("WorldFormed", "world_formed"), ("Entered", "entered"), ("GpuUsed", "gpu_used")]
)
def test_the_name_of_a_kind_comes_from_its_class(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_report_is_known_by_its_kind_and_goes_into_a_message_as_such() -> None:
    assert len(REPORTS) == len(get_args(Report))
    for kind, report in REPORTS.items():
        assert msgspec.inspect.type_info(report).tag == kind  # type: ignore[union-attr]


def test_progress_is_counted_in_rows_of_all_epochs_where_they_are_known_and_else_in_steps() -> None:
    assert Progress(7, epoch=2, rows=300, rows_total=1000).rows_done == 2300
    assert Progress(7, epoch=2, rows=300, rows_total=1000).done == 2300
    assert Progress(7, epoch=2, rows=300, rows_total=1000, rows_trained=500).done == 500
    for unknown in (Progress(7), Progress(7, epoch=2, rows=300), Progress(7, rows=300, rows_total=1000)):
        assert (unknown.rows_done, unknown.done) == (None, 7)


def changed(after: list[int], seconds: list[float]) -> SharesChanged:
    return SharesChanged(9, [50, 25], after, seconds)


def test_a_rank_is_as_slow_as_its_rows_take_longer_than_those_of_the_fastest() -> None:
    assert changed([55, 20], [0.1, 0.1]).slowness == [1.0, 2.0]
    assert SharesChanged(9, [50, 0], [40, 10], [0.1, 0.1]).slowness == [1.0, 50.0], "a rank without rows has one"


@pytest.mark.parametrize(
    ("after", "seconds", "rank"),
    [
        ([60, 15], [0.1, 0.1], 1),
        ([50, 25], [0.1, 0.1], None),  # it has kept its share
        ([52, 23], [0.1, 0.06], None),  # it is not that slow
        ([30, 45], [0.4, 0.1], 0),
    ],
)
def test_the_slowest_rank_counts_as_slow_if_it_is_clearly_so_and_gets_less(
    after: list[int], seconds: list[float], rank: int | None
) -> None:
    assert changed(after, seconds).slow_rank == rank


def test_a_change_of_shares_names_who_is_slow_or_what_all_take() -> None:
    told = changed([60, 15], [0.1, 0.1]).describe(lambda rank: f"rank {rank}")
    assert told.startswith("rank 1 is slow: a row takes it 2.0 times as long as the fastest rank")
    assert told.endswith("of the 75 rows of a step it takes 15 instead of 25")
    assert changed([50, 25], [0.1, 0.1]).describe(str) == "parts of a step follow speeds: of 75 rows ranks take 50, 25"
