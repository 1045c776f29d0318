"""Steps over the shards of a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import torch
from keras_networks import ROWS, convert, dense, values

from spark_elastic import TrainingCodeError
from spark_elastic.data import ElasticDataLoader, ParquetLoader
from spark_elastic.keras import (
    Batches,
    CommitStateCallback,
    KerasState,
)


def of_items(batch: Any) -> tuple[Any, Any]:
    return batch, batch[:, :1] ** 2


@pytest.mark.parametrize(
    ("make", "prepare"),
    [
        (lambda url, **kw: ParquetLoader(url, global_batch_size=8, **kw), convert),
        (
            lambda url, **kw: ElasticDataLoader(
                torch.linspace(-1, 1, 2 * ROWS).view(ROWS, 2), global_batch_size=8, **kw
            ),
            of_items,
        ),
    ],
    ids=["cut here", "delivered in shards"],
)
def test_steps_over_shards_are_steps_over_batches(
    make: Callable[..., Any], prepare: Any, make_loader: Any, tmp_path: Path
) -> None:
    trained = []
    for how in ({}, {"shards": 3}):
        state = KerasState(dense(), loader=make(str(tmp_path), **how))
        state._begin(None)
        history = state.model.fit(
            Batches(state.loader, prepare), epochs=1, verbose=0, callbacks=[CommitStateCallback(state)]
        )
        trained.append((*values(state), torch.tensor(history.history["loss"])))
    for mine, its in zip(*trained, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("source", ["a layer of its own", "Keras", "a generator of its own"])
def test_what_convert_draws_follows_from_the_shard(source: str) -> None:
    noise, generator = keras.layers.GaussianNoise(0.5), keras.random.SeedGenerator(1)
    drawn: list[list[float]] = []

    def noisy(batch: Any) -> tuple[Any, Any]:
        if source == "a layer of its own":
            given = noise(batch, training=True)
        else:
            given = batch + keras.random.normal(batch.shape, seed=None if source == "Keras" else generator)
        drawn[-1].append(float(given.sum()))
        return given, batch[:, :1]

    for before in (0, 3):
        keras.random.normal((before,)), noise(torch.ones(before, 2), training=True), generator.next()
        drawn.append([])
        loader = ElasticDataLoader(torch.linspace(-1, 1, 16).view(8, 2), global_batch_size=8, shards=4)
        state = KerasState(dense(), loader=loader)
        state._begin(None)
        state.model.fit(Batches(state.loader, noisy), epochs=1, verbose=0, callbacks=[CommitStateCallback(state)])
    of_parts = [numbers[-4:] for numbers in drawn]  # Keras asks for a batch before, to build the model
    assert of_parts[0] == of_parts[1]
    assert len(set(of_parts[0])) == 4


def test_on_shards_gradients_outside_of_a_train_step_are_refused(make_loader: Any, tmp_path: Path) -> None:
    state = KerasState(dense(), loader=ParquetLoader(str(tmp_path), global_batch_size=8, shards=2))
    state._begin(None)
    next(iter(state.loader))
    weights = state.model.trainable_weights
    with pytest.raises(TrainingCodeError, match="train by model"):
        state.optimizer.apply([torch.zeros_like(weight.value) for weight in weights], weights)
