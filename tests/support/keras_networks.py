"""Small Keras networks in a state, and loops that train them."""

from __future__ import annotations

from typing import Any

import torch

from spark_elastic.keras import (
    Batches,
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)

import keras  # isort: skip  # after spark_elastic.keras, which chooses the backend

ROWS = 50


def network(*more: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), *more, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


def dense() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return model


def convert(batch: Any) -> tuple[Any, Any]:
    x = batch["x"].float()
    return torch.stack([x, x], 1), batch["y"].float()


def fit(state: KerasState, *callbacks: Any) -> None:
    batches = Batches(state.loader, convert)
    ours = [CommitStateCallback(state), UpdateBatchStateCallback(state), UpdateEpochStateCallback(state)]
    state.model.fit(
        batches, initial_epoch=state.epoch, epochs=state.epoch + 1, verbose=0, callbacks=[*ours, *callbacks]
    )


def values(state: KerasState) -> list[Any]:
    variables = [*state.model.variables, *state.optimizer.variables]
    return [variable.value.detach().clone() for variable in variables]


class Stop(keras.callbacks.Callback):
    """Interrupts at the end of a batch, after the commit if there is one, as a loss would."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self.batch:
            raise ConnectionError
