"""Keras training functions for the tests; pickled by value, as executors do not have the tests."""

from __future__ import annotations

from typing import Any


def count_rows(url: str, rows: int, epochs: int, batch: int) -> dict[str, Any]:
    """Train an embedding that goes up by exactly one for each time that a row counts, and a head with Adam's moments."""
    import hashlib

    import torch

    import spark_elastic as se
    from spark_elastic.keras import (
        Batches,
        CommitStateCallback,
        KerasState,
        UpdateBatchStateCallback,
        UpdateEpochStateCallback,
    )

    import keras  # isort: skip

    class Negated(keras.losses.Loss):
        """Mean over the rows of the batch, so that the gradient of each row's number is -1 / rows of the global batch."""

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return -y_pred

    ids = keras.Input((1,), dtype="int32")
    seen = keras.layers.Embedding(rows, 1, embeddings_initializer="zeros", name="seen")
    normed = keras.layers.BatchNormalization()(keras.ops.cast(ids, "float32") / rows)
    body = keras.layers.Dense(1)(keras.layers.Dropout(0.5)(keras.layers.Dense(8, activation="relu")(normed)))
    outputs = keras.layers.Flatten()(seen(ids)) + 1e-4 * body  # which grows, at such a rate
    model = keras.Model(ids, outputs)
    model.compile(optimizer=keras.optimizers.SGD(float(batch)), loss=Negated(), metrics=["mae"])
    loader = se.data.ParquetLoader(url, global_batch_size=batch, drop_last=True)
    state = KerasState(model, loader=loader)

    @se.elastic
    def train(state: Any) -> None:
        while state.epoch < epochs:
            model.fit(
                Batches(state.loader, lambda rows: (rows["id"].unsqueeze(1), torch.zeros(len(rows["id"]), 1))),
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                verbose=0,
                callbacks=[
                    CommitStateCallback(state),
                    UpdateBatchStateCallback(state),
                    UpdateEpochStateCallback(state),
                ],
            )

    train(state)
    digest = hashlib.sha256()
    for variable in [*model.weights, *state.optimizer.variables]:
        digest.update(variable.value.detach().numpy().tobytes())
    return {"seen": seen.embeddings.value.detach().squeeze(1).tolist(), "digest": digest.hexdigest()}


def train_on_shards(url: str, epochs: int, batch: int, shards: int) -> dict[str, Any]:
    """Train with BatchNormalization and Dropout on shards. Return a digest of all variables, and the loss after each epoch."""
    import hashlib

    import torch

    import spark_elastic as se
    from spark_elastic.keras import Batches, CommitStateCallback, KerasState, UpdateEpochStateCallback

    import keras  # isort: skip

    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((1,)), *layers])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    loader = se.data.ParquetLoader(url, global_batch_size=batch, shards=shards)
    state = KerasState(model, loader=loader, losses=[])

    def convert(rows: Any) -> tuple[Any, Any]:
        x = rows["id"].float().unsqueeze(1) / 1000
        return x, torch.sin(7 * x)

    class Losses(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            state.losses.append(logs["loss"])

    @se.elastic
    def train(state: Any) -> None:
        while state.epoch < epochs:
            model.fit(
                Batches(state.loader, convert),
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                verbose=0,
                callbacks=[Losses(), CommitStateCallback(state), UpdateEpochStateCallback(state)],
            )

    train(state)
    digest = hashlib.sha256()
    for variable in [*model.weights, *state.optimizer.variables]:
        digest.update(variable.value.detach().numpy().tobytes())
    return {"digest": digest.hexdigest(), "losses": state.losses}
