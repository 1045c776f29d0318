"""The row that each rank tells the others at a commit."""

from __future__ import annotations

from spark_elastic.data.tracker import Report
from spark_elastic.worker.state.exchanged import Exchanged


def test_a_row_says_what_was_packed_into_it() -> None:
    told = Exchanged(True, 7, -(1 << 40), False, 5, 8, 1500, True, 1 << 50, Report(2, 640, 64, 1 << 60))
    row = told.packed()
    assert all(type(value) is int for value in row)
    assert Exchanged.unpacked(row) == told
    assert Exchanged.unpacked(row).loader.position == 640
