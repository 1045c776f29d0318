"""Loops that call fit for each epoch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from keras_networks import Stop, convert, fit, network, values

from spark_elastic.data import ParquetLoader
from spark_elastic.keras import (
    Batches,
    CommitStateCallback,
    KerasState,
    UpdateEpochStateCallback,
)


def test_training_goes_on_exactly_where_the_last_commit_was(make_loader: Callable[[], ParquetLoader]) -> None:
    straight = KerasState(network(), loader=make_loader())
    straight._begin(None)
    fit(straight)
    fit(straight)
    broken = KerasState(network(), loader=make_loader())
    broken._begin(None)
    for stop in (0, 2):
        with pytest.raises(ConnectionError):
            fit(broken, Stop(stop))
        torch.nn.init.zeros_(broken.model.weights[0].value)
        broken.optimizer.learning_rate = 7.0
        broken.restore()
    fit(broken)
    fit(broken)
    assert (broken.epoch, broken.batch, broken.loader.epoch) == (2, 0, 2)
    assert all(map(torch.equal, values(broken), values(straight)))


def test_the_last_batch_is_committed_with_its_epoch_so_that_a_newcomer_always_has_one_to_begin_with(
    make_loader: Callable[[], ParquetLoader],
) -> None:
    donor, newcomer = (KerasState(network(), loader=make_loader()) for _ in range(2))
    donor._begin(None)
    with pytest.raises(ConnectionError):
        fit(donor, Stop(len(donor.loader) - 1))
    newcomer._load(donor._keeper.current.content()["objects"])
    newcomer._enter_world(0, 1)
    assert (newcomer.epoch, newcomer.batch, newcomer.loader.steps_left) == (0, len(newcomer.loader) - 1, 1)
    fit(newcomer)
    assert (newcomer.epoch, newcomer.batch, newcomer.loader.steps_left) == (1, 0, len(newcomer.loader))


def test_fit_for_more_than_one_epoch_is_refused(loader: ParquetLoader) -> None:
    state = KerasState(network(), loader=loader)
    with pytest.raises(ValueError, match=r"epochs=3 at state\.epoch=0"):
        state.model.fit(Batches(loader, convert), epochs=3, verbose=0, callbacks=[UpdateEpochStateCallback(state)])


def test_commits_come_every_so_many_batches_and_at_the_end(loader: ParquetLoader) -> None:
    state = KerasState(network(), loader=loader)
    state._begin(None)
    state.model.fit(Batches(loader, convert), epochs=1, verbose=0, callbacks=[CommitStateCallback(state, 4)])
    assert state._commits.steps == 1 + 1  # after the fourth of six batches, and when fit ends
