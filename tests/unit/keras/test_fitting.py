"""KerasState.fit in one process, beside Keras' own; test_keras_jobs.py has jobs."""

from __future__ import annotations

from typing import Any

import keras_training
import pytest
import torch
from keras_networks import Stop, convert, network
from keras_training import callbacks_of, classifier, features, outcome, validation_data

from spark_elastic import TrainingCodeError
from spark_elastic.data import ParquetLoader
from spark_elastic.keras import KerasState

import keras  # isort: skip  # after spark_elastic.keras, which chooses the backend

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
STEPS = 20  # an epoch


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return keras_training.write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def plainly(url: str) -> dict[str, Any]:
    return keras_training.fit_plainly(url)


def state_of(url: str, **settings: Any) -> KerasState:
    return KerasState(classifier(**settings), loader=ParquetLoader(url, global_batch_size=keras_training.BATCH, seed=3))


def train(state: KerasState, *more: Any) -> dict[str, Any]:
    callbacks = callbacks_of()
    given = {"callbacks": [*callbacks, *more], "validation_data": validation_data(), "verbose": 0}
    return outcome(state.model, state.fit(features, epochs=keras_training.EPOCHS, **given), callbacks[0])


class Lost(keras.callbacks.Callback):
    """Loses the connection at the end of these batches, after the user's callbacks, and in validation."""

    def __init__(self, *batches: int, in_epoch: int = -1) -> None:
        super().__init__()
        self._left = list(batches)
        self._epoch = in_epoch
        self._number = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._number += 1
        if self._number in self._left:
            raise ConnectionError

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch:
            raise ConnectionError


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-6) if name != "names" else got[name] == value, name


def test_alone_it_trains_logs_and_stops_as_keras_does(url: str, plainly: dict[str, Any]) -> None:
    state = state_of(url)
    state._begin(None)
    assert len(plainly["epochs"]) < keras_training.EPOCHS
    assert plainly["rate"] < 0.03 / 4
    assert_same(train(state), plainly)


@pytest.mark.parametrize("is_newcomer", [False, True])
def test_after_losses_it_ends_as_if_there_had_been_none(
    url: str, plainly: dict[str, Any], is_newcomer: bool
) -> None:
    state = state_of(url)
    state._begin(None)
    state.save()
    for lost in (Lost(1), Lost(7), Lost(3 * STEPS), Lost(STEPS + 5, in_epoch=4), Lost(in_epoch=6)):
        with pytest.raises(ConnectionError):
            train(state, lost)
        torch.nn.init.zeros_(state.model.weights[0].value)
        kept = state._keeper.current.content()["objects"]
        if is_newcomer:
            state = state_of(url)
            state._load(kept)
            state._enter_world(0, 1)
        else:
            state.restore()
    assert_same(train(state), plainly)
