"""How many rows have trained, from commit to commit."""

from __future__ import annotations

from types import SimpleNamespace

from spark_elastic.worker.state.trained_rows import TrainedRows


def at(epoch: int, rows: int) -> SimpleNamespace:
    return SimpleNamespace(epoch=epoch, rows_processed=rows, rows_total=100)


def counted(*commits: tuple[int, int], rows: TrainedRows | None = None) -> int:
    rows = rows or TrainedRows()
    rows.enter(at(0, 0))
    for place in commits:
        rows.commit(at(*place))
    return rows.total


def test_epochs_that_are_left_early_or_skipped_count_as_far_as_they_went() -> None:
    assert counted((0, 20), (0, 40), (1, 20), (2, 20)) == 80
    assert counted((0, 100), (1000, 30), (2000, 30)) == 160


def test_an_epoch_that_is_trained_again_counts_again() -> None:
    assert counted((0, 60), (0, 20), (0, 40)) == 100
    assert counted((0, 100), (0, 0), (0, 30)) == 130


def test_a_survivor_goes_on_counting_and_who_knows_no_epochs_before_counts_them_as_whole() -> None:
    rows = TrainedRows()
    counted((0, 20), (3, 20), rows=rows)
    rows.enter(at(3, 20))
    rows.commit(at(3, 40))
    assert rows.total == 60
    newcomer = TrainedRows()
    newcomer.enter(at(3, 20))
    assert newcomer.total == 320
    rows.enter(at(2, 50))  # a durable checkpoint
    assert rows.total == 250
