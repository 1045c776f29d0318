"""What fit takes from a loader."""

from __future__ import annotations

from typing import Any

import pytest
from keras_networks import ROWS, convert, network

from spark_elastic.data import ParquetLoader
from spark_elastic.keras import (
    Batches,
    KerasState,
    UpdateBatchStateCallback,
)

import keras  # isort: skip  # after spark_elastic.keras, which chooses the backend


def test_fit_takes_every_row_once_and_never_one_ahead(loader: ParquetLoader) -> None:
    state = KerasState(network(), loader=loader)
    state._begin(None)
    seen: list[tuple[int, int]] = []
    rows: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((loader.rows_processed, state.batch))

    def noting(batch: Any) -> tuple[Any, Any]:
        rows.extend(batch["y"].tolist())
        return convert(batch)

    state.model.fit(Batches(loader, noting), epochs=1, verbose=0, callbacks=[UpdateBatchStateCallback(state), Watch()])
    assert seen == [(8, 1), (16, 2), (24, 3), (32, 4), (40, 5), (50, 6)]
    assert sorted(rows) == [row / ROWS for row in range(ROWS)]


def test_batches_are_good_for_one_epoch(loader: ParquetLoader) -> None:
    with pytest.raises(ValueError, match="new Batches each time"):
        network().fit(Batches(loader, convert), epochs=2, verbose=0)
