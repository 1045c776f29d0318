"""What Params accept, and the form in which they store it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic.estimator import Store, TorchClassifier, TorchEstimator


def test_a_seed_may_be_as_large_as_spark_can_store_it_and_no_larger() -> None:
    assert TorchEstimator(seed=2**63 - 1).getSeed() == 2**63 - 1
    with pytest.raises(ValueError, match="seed: must be a whole number up to 9223372036854775807"):
        TorchEstimator(seed=2**63)


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"batchSize": 0}, "batchSize: must be a whole number from 1 on, not 0"),
        ({"epochs": 1.5}, "epochs: must be a whole number"),
        ({"validationFraction": 1.0}, "validationFraction: must be a number at least 0 and below 1"),
        ({"model": "net"}, "model: must be a torch.nn.Module"),
        ({"modelParams": {"a": object()}}, "modelParams: must hold numbers"),
        ({"featureCols": []}, "featureCols: must be a list of column names"),
        ({"mixedPrecision": "fp8"}, "mixedPrecision: must be one of bf16, fp16"),
        ({"callbacks": [print]}, "callbacks: must be objects with on_epoch_end"),
        ({"loggers": [print]}, "loggers: .* is not a logger of spark_elastic.loggers"),
        ({"store": 3}, "store: must be a Store or its URL"),
        ({"metrics": [abs, abs]}, "two metrics are called abs"),
    ],
)
def test_wrong_values_name_the_param(params: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        TorchEstimator(**params)


def test_a_store_may_be_given_by_its_path() -> None:
    assert TorchEstimator(store=Path("/data/store")).getStore() == Store.create("/data/store")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("balanced", "balanced"),
        ([1, 2], [1.0, 2.0]),
        (np.array([1.0, 2.0]), [1.0, 2.0]),
        ({1: 2}, {1: 2.0}),
        ({1.0: np.float32(2)}, {1: 2.0}),
    ],
)
def test_what_class_weights_may_be(given: Any, kept: Any) -> None:
    assert TorchClassifier(classWeights=given).getClassWeights() == kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("even", "must be one of balanced, not 'even'"),
        ([1, -1], "must be a number at least 0"),
        ([1, float("nan")], "must be a number at least 0"),
        ([1, float("inf")], "must be a number at least 0"),
        ({"a": 1}, "must be a whole number"),
        ({-1: 1}, "must be a whole number from 0 on"),
        ([0, 0], "must have a number above 0"),
        ([], "must have a number above 0"),
        (3, "must be 'balanced', or a list or dict of numbers"),
    ],
)
def test_what_class_weights_may_not_be(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"classWeights: {message}"):
        TorchClassifier(classWeights=given)


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"loss": nn.MSELoss}, r"loss: .* not the class MSELoss: write MSELoss\(\)"),
        ({"loss": [nn.MSELoss(), nn.L1Loss]}, r"write L1Loss\(\)"),
        ({"metrics": {"gap": nn.L1Loss}}, r"metrics: .* write L1Loss\(\)"),
        (
            {"model": nn.Linear},
            r"model: must be an instance of torch.nn.Module, not the class Linear: write Linear\(…\)",
        ),
        ({"model": torch.jit.script(nn.Linear(1, 1))}, "model: is a TorchScript module, which cannot be pickled"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1)},
            "scheduler: must be callable.* give the class StepLR",
        ),
    ],
)
def test_a_class_in_place_of_an_object_or_the_other_way_round_is_named(params: dict[str, Any], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        TorchEstimator(**params)
