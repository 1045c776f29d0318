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


BATCH, EPOCHS = 50, 12
# What stops the training well before the last epoch, and turns the rate down on the way.
PATIENCE = 3
# The epochs in which a callback freezes a layer.
FROZEN = (2, 3, 4)


def classifier(use_ema: bool = False) -> Any:
    """Return a network that soon begins to fit the noise in its labels, with metrics of all kinds."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(
        optimizer=keras.optimizers.Adam(0.03, use_ema=use_ema, ema_momentum=0.9),
        loss="binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.RootMeanSquaredError(name="error")],
    )
    return model


def features(rows: Any) -> tuple[Any, Any]:
    """Return inputs and labels, a fifth of which are wrong."""
    import torch

    ids = rows["id"].float()
    x = torch.stack([torch.sin(ids), torch.cos(3 * ids), torch.sin(7 * ids), ids / 500], 1)
    is_wrong = (rows["id"] * 7919 % 5 == 0).float()
    y = ((x[:, 0] * x[:, 1] > 0).float() - is_wrong).abs()
    return x, y.unsqueeze(1)


def callbacks_of(patience: int = PATIENCE) -> list[Any]:
    """Return callbacks that remember the course of a training, two of Keras' own and one of a user's."""
    import keras

    class Notes(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.batches = self.begun = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begun += 1
            self.model.layers[0].trainable = epoch not in FROZEN

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1
            self.losses.append(logs["loss"])

    rate = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.003)
    return [
        Notes(),
        rate,
        keras.callbacks.EarlyStopping(
            monitor="val_loss", patience=patience, restore_best_weights=True, min_delta=0.003
        ),
    ]


def validation_data() -> tuple[Any, Any]:
    import torch

    return features({"id": torch.arange(2000, 2100)})


def outcome(model: Any, history: Any, notes: Any) -> dict[str, Any]:
    """Return what there is to compare of a training."""
    return {
        "epochs": history.epoch,
        "names": sorted(history.history),
        "history": [value for name in sorted(history.history) for value in history.history[name]],
        "rate": float(model.optimizer.learning_rate),
        "weights": [value for weight in model.get_weights() for value in weight.flatten().tolist()],
        "losses": notes.losses,
        "counts": [notes.batches, notes.begun],
    }


def fit(url: str, shards: int | None = None, use_ema: bool = False, epochs: int = EPOCHS) -> dict[str, Any]:
    """Fit until the validation has become worse several times."""
    import spark_elastic as se
    from spark_elastic.keras import KerasState

    model = classifier(use_ema)
    loader = se.data.ParquetLoader(url, global_batch_size=BATCH, seed=3, shards=shards)
    state = KerasState(model, loader=loader)

    @se.elastic
    def train(state: Any) -> dict[str, Any]:
        callbacks = callbacks_of()
        given = {"callbacks": callbacks, "validation_data": validation_data(), "verbose": 0}
        return outcome(model, state.fit(features, epochs=epochs, **given), callbacks[0])

    result: dict[str, Any] = train(state)
    return result


def fit_plainly(url: str, use_ema: bool = False) -> dict[str, Any]:
    """Have Keras alone train on the same batches."""
    import spark_elastic as se
    import spark_elastic.keras  # which chooses Keras' backend

    import keras  # isort: skip

    loader = se.data.ParquetLoader(url, global_batch_size=BATCH, seed=3)
    loader.set_world(0, 1)
    epochs = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        epochs.append([features(rows) for rows in loader])

    class Data(keras.utils.PyDataset):
        epoch = 0
        num_batches = len(epochs[0])

        def __getitem__(self, index: int) -> Any:
            return epochs[self.epoch][index]

    data = Data()

    class Next(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            data.epoch = epoch

    model, callbacks = classifier(use_ema), callbacks_of()
    given = {"epochs": EPOCHS, "validation_data": validation_data(), "verbose": 0, "shuffle": False}
    return outcome(model, model.fit(data, callbacks=[Next(), *callbacks], **given), callbacks[0])


def write_rows(folder: Any) -> str:
    """Write rows for ``fit``, and return where they are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": pa.array(range(500), pa.int64())}), folder / "rows.parquet", row_group_size=97)
    return str(folder)


def stop_on_one_rank(url: str) -> tuple[int, int]:
    """Have a callback stop training on rank 1 in its second batch. Return the epochs that are over, and the batches trained."""
    import spark_elastic as se
    from spark_elastic.keras import KerasState

    import keras  # isort: skip

    state = KerasState(classifier(), loader=se.data.ParquetLoader(url, global_batch_size=BATCH), trained=0)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            state.trained += 1
            if se.rank() == 1 and batch == 1:
                self.model.stop_training = True

    @se.elastic
    def train(state: Any) -> None:
        state.fit(features, epochs=3, callbacks=Stop(), verbose=0)

    train(state)
    return state.epoch, state.trained


def fit_and_write(url: str, folder: str, epochs: int) -> tuple[int, float | None, float]:
    """Have Keras' callbacks write a log and the best model. Return the rank, the best loss that it knows, and the history's."""
    import spark_elastic as se
    from spark_elastic.keras import KerasState

    import keras  # isort: skip

    state = KerasState(classifier(), loader=se.data.ParquetLoader(url, global_batch_size=BATCH))

    @se.elastic
    def train(state: Any) -> tuple[int, float | None, float]:
        best = keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", monitor="val_loss", save_best_only=True)
        log = keras.callbacks.CSVLogger(f"{folder}/log.csv", append=True)
        given = {"callbacks": [best, log], "validation_data": validation_data(), "verbose": 0}
        history = state.fit(features, epochs=epochs, **given)
        return se.rank(), best.best, min(history.history["val_loss"])

    result: tuple[int, float | None, float] = train(state)
    return result
