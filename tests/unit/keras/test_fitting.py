"""KerasState.fit in one process, beside Keras' own; test_keras_jobs.py has jobs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras_training
import pytest
import torch
from keras_networks import Stop, convert, network
from keras_training import callbacks_of, classifier, features, outcome, validation_data

from spark_elastic import TrainingCodeError
from spark_elastic.data import ParquetLoader
from spark_elastic.keras import KerasState
from spark_elastic.worker.state.attributes import Attributes

import keras  # isort: skip  # after spark_elastic.keras, which chooses the backend

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
STEPS = 10  # an epoch


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take most of the time of such small steps where the suite's other tests run, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    assert 6 < len(plainly["epochs"]) < keras_training.EPOCHS
    assert plainly["rate"] < 0.03 / 2
    assert_same(train(state), plainly)


@pytest.mark.parametrize("is_newcomer", [False, True])
def test_after_losses_it_ends_as_if_there_had_been_none(url: str, plainly: dict[str, Any], is_newcomer: bool) -> None:
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


def test_an_average_of_weights_takes_their_place_at_the_end_of_training_only(url: str) -> None:
    state = state_of(url, use_ema=True)
    state._begin(None)
    with pytest.raises(ConnectionError):
        train(state, Lost(2 * STEPS + 4))
    state.restore()
    assert_same(train(state), keras_training.fit_plainly(url, use_ema=True))


def fit(state: KerasState, *callbacks: Any, epochs: int = 2) -> list[int]:
    history = state.fit(convert, epochs=epochs, callbacks=callbacks, verbose=0)
    return [int(epoch) for epoch in history.epoch]


@pytest.fixture
def state(loader: ParquetLoader) -> KerasState:
    state = KerasState(network(), loader=loader)
    state._begin(None)
    return state


class Ends(keras.callbacks.Callback):
    """Stops training in the middle of an epoch, and counts what it is told of the end."""

    def __init__(self, after: int = sys.maxsize) -> None:
        super().__init__()
        self.after, self.ends = after, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch == self.after

    def on_train_end(self, logs: Any = None) -> None:
        self.ends += 1


def test_a_callback_may_end_training_within_an_epoch(state: KerasState) -> None:
    ends = Ends(after=2)
    assert fit(state, ends) == [0]
    assert (state.epoch, state.batch, state.loader.steps_left) == (1, 0, len(state.loader))
    assert ends.ends == 1


def test_a_training_that_is_over_is_not_begun_again_by_a_world_that_forms_afterwards(state: KerasState) -> None:
    assert fit(state, Ends()) == [0, 1]
    commits, late = state._commits.steps, Ends()
    state._enter_world(0, 1)
    assert fit(state, late) == [0, 1]
    assert (late.ends, state._commits.steps) == (1, commits)  # what it remembers


def test_a_further_training_begins_with_callbacks_of_its_own_and_goes_on_with_those_after_a_loss(
    state: KerasState,
) -> None:
    first, second = Ends(), Ends()
    assert fit(state, first) == [0, 1]
    with pytest.raises(ConnectionError):
        fit(state, second, Stop(0), epochs=3)
    state.restore()
    state._enter_world(0, 1)
    assert fit(state, first) == [0, 1]  # not what a further training has done since
    assert fit(state, second, epochs=3) == [0, 1, 2]
    assert (first.ends, second.ends) == (1, 1)


def test_a_callback_that_two_trainings_share_goes_on_as_it_does_with_keras(state: KerasState) -> None:
    both = Ends()
    fit(state, both)
    with pytest.raises(ConnectionError):
        fit(state, both, Stop(1), epochs=3)
    state.restore()
    state._enter_world(0, 1)
    fit(state, both)
    fit(state, both, epochs=3)
    assert both.ends == 2


def test_what_callbacks_set_when_training_begins_is_not_set_again_after_a_loss(state: KerasState) -> None:
    class Rate(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2

    with pytest.raises(ConnectionError):
        fit(state, Rate(), Stop(3), epochs=1)
    state.restore()
    fit(state, Rate(), epochs=1)
    assert float(state.optimizer.learning_rate) == pytest.approx(0.1 / 2**6)


def test_a_log_that_is_appended_to_has_one_header(state: KerasState, tmp_path: Path) -> None:
    log = keras.callbacks.CSVLogger(f"{tmp_path}/log", append=True)
    with pytest.raises(ConnectionError):
        fit(state, log, Lost(9))
    state.restore()
    fit(state, log)
    written = (tmp_path / "log").read_text().splitlines()
    assert [line.partition(",")[0] for line in written] == ["epoch", "0", "1"]


def test_a_list_that_the_caller_gave_to_a_callback_stays_the_callers(state: KerasState) -> None:
    class Collect(keras.callbacks.Callback):
        def __init__(self, losses: list[float]) -> None:
            super().__init__()
            self.losses = losses

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.losses.append(logs["loss"])

    losses: list[float] = []
    collect = Collect(losses)
    with pytest.raises(ConnectionError):
        fit(state, collect, Stop(3), epochs=1)
    assert len(losses) == 4
    state.restore()
    fit(state, collect, epochs=1)
    assert len(losses) == 6


def test_fewer_epochs_than_have_been_trained_are_told_of(state: KerasState) -> None:
    fit(state, epochs=2)
    with pytest.warns(UserWarning, match="2 epochs have been trained, so epochs=1 trains none"):
        fit(state, epochs=1)


def test_a_limit_of_epochs_is_no_endless_loop(state: KerasState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keras.src.backend.config.max_epochs", lambda: 1)
    with pytest.raises(TrainingCodeError, match="has trained nothing"), pytest.warns(UserWarning, match="Limiting"):
        fit(state)


class Custom(keras.Sequential):
    """Returns numbers of its own from its steps."""

    returned: Any = None

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return {**logs, **self.returned(self)} if self.returned else logs


def custom(loader: Any, returned: Any) -> Any:
    model = Custom([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    model.returned = returned
    state = KerasState(model, loader=loader)
    state._begin(None)
    return state


def test_a_number_that_no_metric_has_is_refused(make_loader: Any) -> None:
    for returned in (lambda _: {"gap": 0.5}, lambda _: {"loss": torch.tensor(0.25)}):
        with pytest.raises(
            TrainingCodeError, match=r"train_step returns '(gap|loss)', which is not the result of a metric"
        ):
            fit(custom(make_loader(), returned))


def test_a_metric_of_the_models_own_is_had_of_all_rows(loader: ParquetLoader) -> None:
    mean = keras.metrics.Mean(name="gap")

    def returned(model: Any) -> dict[str, Any]:
        mean.update_state(0.5)
        return {"gap": mean.result()}

    state = custom(loader, None)
    state.model.gap, state.model.returned = mean, returned
    assert state.fit(convert, epochs=1, verbose=0).history["gap"] == [0.5]


def test_a_metric_whose_variables_come_late_is_refused(loader: ParquetLoader) -> None:
    class Late(Custom):
        def train_step(self, data: Any) -> Any:
            self.late.update_state([[1.0]], [[0.7]])
            return super().train_step(data)

    model = Late([keras.Input((2,)), keras.layers.Dense(1)])
    model.late = keras.metrics.F1Score(name="late", threshold=0.5)
    model.compile(optimizer="sgd", loss="mse")
    state = KerasState(model, loader=loader)
    state._begin(None)
    with pytest.raises(TrainingCodeError, match="before the KerasState is made"):
        fit(state)


def test_so_many_epochs_are_trained_once(state: KerasState) -> None:
    fit(state)
    with pytest.raises(TrainingCodeError, match="2 epochs already: epochs= counts from the beginning"):
        fit(state)


def test_batches_and_steps_are_those_of_the_epoch_also_where_training_goes_on_within_one(state: KerasState) -> None:
    seen: list[tuple[int, int]] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append((batch, self.params["steps"]))

    with pytest.raises(ConnectionError):
        fit(state, Stop(3), epochs=1)
    state.restore()
    assert fit(state, Watch(), epochs=1) == [0]
    assert seen == [(batch, 6) for batch in range(3, 6)]


def test_rank_0_writes(state: KerasState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr("spark_elastic.keras.fitting.rank", lambda: 1)
    files = [
        keras.callbacks.CSVLogger(f"{tmp_path}/log", append=True),
        keras.callbacks.ModelCheckpoint(f"{tmp_path}/m.keras"),
    ]
    state.fit(convert, epochs=1, callbacks=files)
    assert (list(tmp_path.glob("*[glk].*")), capsys.readouterr().out) == ([], "")
    monkeypatch.setattr("spark_elastic.keras.fitting.rank", lambda: 0)
    state.fit(convert, epochs=2, callbacks=files)
    assert (tmp_path / "m.keras").exists()
    assert (tmp_path / "log").read_text().splitlines()[1].startswith("1,")
    assert "Epoch 2/2" in capsys.readouterr().out


def test_a_state_without_a_loader_has_no_batches_to_fit() -> None:
    with pytest.raises(ValueError, match="loader=…"):
        KerasState(network()).fit(convert, epochs=1)


@pytest.mark.parametrize("kind", [keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau])
def test_what_keras_callbacks_count_is_plain(kind: Any) -> None:
    """Their attributes are Keras' own, under names that may change."""
    callback = kind("loss", patience=5)
    callback.set_model(network())
    callback.on_train_begin()
    known = Attributes(callback)
    for epoch in range(3):
        callback.on_epoch_end(epoch, {"loss": 1.0})
    assert known.values().items() >= {"best": 1.0, "wait": 2}.items()
