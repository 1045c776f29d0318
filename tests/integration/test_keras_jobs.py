"""Keras models in real jobs, through kills."""

from __future__ import annotations

from typing import Any

import cloudpickle
import keras_training
import pytest

from spark_elastic.testing import kill

cloudpickle.register_pickle_by_value(keras_training)
ROWS, BATCH, EPOCHS = 1000, 63, 2


def test_a_keras_model_counts_every_row_once_and_ends_with_equal_weights_through_kills(run: Any, dataset: str) -> None:
    # 63 rows are 32 and 31 on two ranks. The last of an epoch's 15 steps is committed at its end.
    faults = [kill(rank=1, step=5), kill(rank=0, step=20)]
    result = run(keras_training.count_rows, dataset, ROWS, EPOCHS, BATCH, faults=faults, min_np=2, max_np=2)
    assert (result.faults, result.sizes) == (2, [2, 2, 2])
    assert len({one["digest"] for one in result.results}) == 1
    for one in result.results:
        assert sum(one["seen"]) == pytest.approx(EPOCHS * (ROWS - ROWS % BATCH))
        assert one["seen"] == pytest.approx([float(round(count)) for count in one["seen"]], abs=1e-4)


def test_on_shards_three_workers_with_kills_leave_the_bits_of_one(run: Any, dataset: str) -> None:
    arguments = (keras_training.train_on_shards, dataset, EPOCHS, 100, 6)
    alone = run(*arguments, min_np=1, max_np=1)
    faults = [kill(rank=1, step=3), kill(rank=0, step=14)]
    result = run(*arguments, faults=faults, num_proc=3, min_np=2, max_np=3)
    assert result.faults == len(faults)
    assert {each["digest"] for each in result.results} == {alone.results[0]["digest"]}
