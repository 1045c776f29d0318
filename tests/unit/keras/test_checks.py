"""What fit cannot take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from keras_networks import convert, fit, network

from spark_elastic import TrainingCodeError
from spark_elastic.data import ParquetLoader
from spark_elastic.keras import CommitStateCallback, KerasState, UpdateBatchStateCallback, UpdateEpochStateCallback

import keras  # isort: skip  # after spark_elastic.keras, which chooses the backend


@pytest.fixture
def state(loader: ParquetLoader) -> KerasState:
    state = KerasState(network(), loader=loader)
    state._begin(None)
    return state


@pytest.mark.parametrize("name", ["batch_size", "shuffle", "steps_per_epoch", "initial_epoch", "validation_split", "x"])
def test_settings_that_the_loader_decides_are_refused(state: KerasState, name: str) -> None:
    with pytest.raises(TypeError, match=f"takes no {name}="):
        state.fit(convert, epochs=1, **{name: 1})


def test_validation_by_an_iterator_is_refused_as_it_gives_its_batches_once(state: KerasState) -> None:
    batches = (convert(batch) for batch in state.loader)
    with pytest.raises(TypeError, match="validation_data is an iterator"):
        state.fit(convert, epochs=1, validation_data=batches, validation_steps=1)


@pytest.mark.parametrize("kind", [CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback])
def test_callbacks_for_loops_are_refused(state: KerasState, kind: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=f"by itself: leave out {kind.__name__}"):
        state.fit(convert, epochs=1, callbacks=kind(state))


def test_callbacks_that_would_destroy_what_they_wrote_are_refused(state: KerasState) -> None:
    with pytest.raises(ValueError, match=r"BackupAndRestore .*run\(checkpoint=\)"):
        state.fit(convert, epochs=1, callbacks=[keras.callbacks.BackupAndRestore("folder")])
    with pytest.raises(ValueError, match=r"CSVLogger .*append=True"):
        state.fit(convert, epochs=1, callbacks=[keras.callbacks.CSVLogger("file")])


@pytest.mark.parametrize("callback", [keras.callbacks.EarlyStopping("loss"), keras.callbacks.ReduceLROnPlateau("loss")])
def test_a_loop_over_epochs_refuses_callbacks_that_would_never_act(state: KerasState, callback: Any) -> None:
    with pytest.raises(TrainingCodeError, match=rf"{type(callback).__name__} starts over .*state\.fit\(convert"):
        fit(state, callback)
    torch_batches = [(torch.zeros(4, 2), torch.zeros(4, 1))]
    # In one fit over all epochs it does.
    x, y = torch_batches[0]
    state.model.fit(x, y, epochs=2, verbose=0, callbacks=[callback])


def test_a_loop_over_epochs_refuses_an_average_that_would_replace_the_weights_after_each(loader: ParquetLoader) -> None:
    model = network()
    model.compile(optimizer=keras.optimizers.SGD(0.01, use_ema=True), loss="mse")
    state = KerasState(model, loader=loader)
    state._begin(None)
    with pytest.raises(TrainingCodeError, match=r"use_ema=True .*state\.fit\(convert"):
        fit(state)


def test_losses_that_are_no_means_over_rows_are_refused(state: KerasState) -> None:
    for reduction in ("sum", "mean_with_sample_weight"):
        model = network()
        model.compile(optimizer="sgd", loss=[keras.losses.MeanSquaredError(reduction=reduction)])
        with pytest.raises(
            TrainingCodeError, match=rf'MeanSquaredError\(reduction="{reduction}"\) is not a mean over rows'
        ):
            KerasState(model, loader=state.loader).model.fit(torch.zeros(4, 2), torch.zeros(4, 1), verbose=0)


def test_a_model_that_is_compiled_anew_is_refused(state: KerasState) -> None:
    state.model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(TrainingCodeError, match="another optimizer than its KerasState"):
        state.fit(convert, epochs=1)


def test_a_model_checkpoint_after_batches_is_refused(state: KerasState) -> None:
    with pytest.raises(ValueError, match=r'ModelCheckpoint\(save_freq=…\) .*save_freq="epoch"'):
        state.fit(convert, epochs=1, callbacks=[[keras.callbacks.ModelCheckpoint("m.keras", save_freq=8)]])


def test_class_weights_do_not_reach_shards(tmp_path: Path, make_loader: Any) -> None:
    state = KerasState(network(), loader=ParquetLoader(str(tmp_path), global_batch_size=8, shards=2))
    with pytest.raises(ValueError, match=r"class_weight= does not reach shards"):
        state.fit(convert, epochs=1, class_weight={0: 1.0, 1: 2.0})


def test_the_name_of_what_fit_keeps_is_taken(loader: ParquetLoader) -> None:
    with pytest.raises(TypeError, match="progress"):
        KerasState(network(), loader=loader, progress=0)
