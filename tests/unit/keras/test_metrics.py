"""Metrics of a step, added up over ranks and shards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from spark_elastic import TrainingCodeError
from spark_elastic.keras.metrics import Totals, check_metrics, reduced, sum_over_ranks, sum_over_shards

import keras  # isort: skip


def test_the_part_of_each_step_is_added_to_what_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has added up the same."""
    monkeypatch.setattr("spark_elastic.keras.metrics.allreduce", lambda tensor, op: 2 * tensor)
    metrics = [keras.metrics.Mean(), keras.metrics.MeanIoU(2)]
    for _ in range(3):
        totals = Totals(metrics)
        metrics[0].update_state([1.0, 2.0])
        metrics[1].update_state([0, 1], [1, 1])
        totals.add(sum_over_ranks(totals.part()))
    assert [float(variable.value) for variable in metrics[0].variables] == [18.0, 12.0]
    assert metrics[1].total_cm.value.tolist() == [[0, 6], [0, 6]]


def test_shards_are_added_up_in_their_order_whoever_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [[torch.tensor(value)] for value in (1e8, 1.0, -1e8, 1.0)]
    alone = sum_over_shards(parts)
    monkeypatch.setattr("spark_elastic.keras.metrics.allgather_object", lambda mine: [mine, parts[1:3], parts[3:]])
    assert sum_over_shards(parts[:1]) == alone


def test_a_metric_that_is_no_sum_is_refused() -> None:
    class Newest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.newest = self.add_variable((), "zeros", aggregation="only_first_replica", name="newest")

    with pytest.raises(TrainingCodeError, match="newest of a metric has aggregation='only_first_replica'"):
        Totals([Newest()])


def test_tensors_of_a_dtype_are_reduced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def note(tensor: torch.Tensor, op: str) -> torch.Tensor:
        calls.append((tensor.tolist(), op))
        return tensor + 1

    monkeypatch.setattr("spark_elastic.keras.metrics.allreduce", note)
    tensors = [torch.tensor([1.0]), None, torch.tensor(5), torch.tensor([[2.0, 3.0]])]
    assert str(reduced(tensors, "mean", 2.0)) == str(
        [torch.tensor([3.0]), None, torch.tensor(11.0), torch.tensor([[5.0, 7.0]])]
    )
    assert calls == [([2.0, 4.0, 6.0], "mean"), ([10.0], "mean")]


class Largest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))


class Listed(keras.metrics.Mean):
    variables: Any = ()


def test_metrics_that_may_be_no_sums_are_warned_of_and_those_without_variables_refused() -> None:
    with pytest.warns(UserWarning, match="metric largest are added up over steps and ranks"):
        check_metrics([Largest()])
    with pytest.raises(TrainingCodeError, match="metric listed has no variables"):
        check_metrics([Listed(name="listed")])
    with pytest.warns(UserWarning, match="metric pearson_correlation has axis=0"):
        check_metrics([keras.metrics.PearsonCorrelation(axis=0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_metrics([keras.metrics.Mean(), keras.metrics.AUC(), keras.metrics.PearsonCorrelation()])
