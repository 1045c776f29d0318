"""How many rows have trained, from commit to commit."""

from __future__ import annotations

import torch

from spark_elastic.data import ElasticDataLoader
from spark_elastic.worker.state.trained_rows import TrainedRows


def entered(epoch: int = 0) -> tuple[ElasticDataLoader, TrainedRows]:
    loader, rows = ElasticDataLoader(torch.arange(100), global_batch_size=20), TrainedRows()
    loader.set_world(0, 1)
    loader.set_epoch(epoch)
    rows.enter(loader)
    return loader, rows


def train(loader: ElasticDataLoader, batches: int, rows: TrainedRows | None = None) -> None:
    for number, _ in enumerate(loader, 1):
        if rows is not None:
            rows.commit(loader)
        if number == batches:
            break


def test_epochs_that_are_left_early_or_skipped_count_as_far_as_they_went() -> None:
    loader, rows = entered()
    for epoch, batches in ((0, 2), (1, 1), (1000, 5)):
        loader.set_epoch(epoch)
        train(loader, batches, rows)
    assert rows.total == 40 + 20 + 100


def test_a_commit_after_the_next_epoch_was_set_counts_the_one_before() -> None:
    loader, rows = entered()
    train(loader, 5)
    loader.set_epoch(1)
    assert rows.total == 0
    rows.commit(loader)
    assert rows.total == 100


def test_a_survivor_goes_on_counting_and_counts_no_row_twice_that_no_commit_had_counted() -> None:
    loader, rows = entered()
    train(loader, 2, rows)
    kept = loader.state_dict()
    train(loader, 1)
    loader.load_state_dict(kept)
    rows.enter(loader)
    train(loader, 2, rows)
    assert rows.total == 80


def test_what_was_trained_after_an_older_commit_counts_once() -> None:
    loader, rows = entered()
    train(loader, 1, rows)
    kept = loader.state_dict()
    train(loader, 3, rows)
    loader.load_state_dict(kept)
    rows.enter(loader)
    train(loader, 4, rows)
    assert rows.total == 100


def test_a_loader_that_replaces_another_one_counts_from_its_first_row() -> None:
    loader, rows = entered()
    train(loader, 5, rows)
    other, _ = entered()
    train(other, 2, rows)
    assert rows.total == 140


def test_who_has_not_seen_the_epochs_before_counts_them_as_whole() -> None:
    loader, rows = entered(epoch=3)
    train(loader, 1, rows)
    assert rows.total == 320
