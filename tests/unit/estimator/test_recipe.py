"""The recipe of a fit: what its one step on the driver shows."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from unstarted_fits import SCHEMA, make, recipe

from spark_elastic.estimator import TorchClassifier, TorchEstimator
from spark_elastic.estimator.estimator import _check_classes
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.planning import plan_recipe
from spark_elastic.estimator.recipe import own_randomness


def test_concurrent_fits_do_not_draw_each_others_random_numbers() -> None:
    def draw() -> None:
        with own_randomness(2):
            inside.set()
            left.wait()

    with own_randomness(1):
        expected = torch.rand(1)
    inside, left = threading.Event(), threading.Event()
    other = threading.Thread(target=draw)
    before = torch.get_rng_state()
    with own_randomness(1):
        other.start()
        assert not inside.wait(0.2), "the other waits for its turn"
        assert torch.equal(torch.rand(1), expected)
    left.set()
    other.join()
    assert inside.is_set()
    assert torch.equal(torch.get_rng_state(), before)


def test_labels_that_a_loss_takes_as_classes_have_no_fractions() -> None:
    classes = torch.nn.CrossEntropyLoss()
    several = make(labelCols=["y", "n"], model=torch.nn.Linear(1, 2), loss=[torch.nn.MSELoss(), classes])
    assert plan_recipe(several, several._layout(SCHEMA), None).class_labels(2) == ("n",)
    stacked = make(labelCols=["y", "n"], model=torch.nn.Linear(1, 2), loss=classes)
    assert recipe(stacked).class_labels(1) == ()
    one = {"labelCols": ["y"], "model": torch.nn.Linear(1, 2), "loss": classes}
    assert recipe(make(**one)).class_labels(1) == ("y",)
    assert recipe(make(**one, transform=dict)).class_labels(1) == ()
    assert recipe(make(**one, trainStep=max)).class_labels(1) == ()
    assert recipe(TorchClassifier(model=torch.nn.Linear(1, 1), featuresCol="x", labelCol="y")).class_labels(1) == ("y",)
    _check_classes(("y",), {"y": {"fraction": None}})
    with pytest.raises(ValueError, match=r"column 'y' has the label 0.7; the loss takes class indexes"):
        _check_classes(("y",), {"y": {"fraction": 0.7}})


def test_what_a_loss_weighs_is_known_by_its_arguments_or_by_the_labels() -> None:
    given = {"model": nn.Linear(1, 3), "featuresCol": "x", "labelCol": "y"}

    def recipe(loss: Any, **more: Any) -> Any:
        return plan_recipe(TorchClassifier(loss=loss, **given, **more), Layout((Input(None, ("x",)),), ("y",)), None)

    def weighs(loss: Any, least: float | None, shards: int | None = None, width: int = 0, **more: Any) -> bool:
        facts = {} if least is None else {"y": {"min": least}}
        sample = {"y": torch.zeros((2, width) if width else 2)}
        found: bool = recipe(loss, **more).weighs_labels(facts, shards, sample)
        return found

    entropy, weighted = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.ones(3))
    assert weighs(weighted, None)
    assert weighs(nn.CrossEntropyLoss(ignore_index=2), None)
    assert not weighs(entropy, 0.0)
    assert weighs(entropy, -100.0)
    # Of existing data nothing is known, of lists no more than their lengths, and a transform may change labels.
    assert weighs(entropy, None)
    assert weighs(entropy, 5.0, width=5)
    assert weighs(entropy, 0.0, transform=dict)
    assert not weighs(nn.MSELoss(), 5.0, width=5)
    assert not weighs(entropy, 5.0, shards=24, width=5)  # where shards meet an ignored label, they raise
    with pytest.raises(ValueError, match="CrossEntropyLoss ignores some labels of column 'y'"):
        weighs(entropy, -100.0, shards=24)
    with pytest.raises(
        ValueError, match=r"deterministic=True .* CrossEntropyLoss\(weight=, ignore_index=\) by something else"
    ):
        recipe(weighted, deterministic=True, globalBatchSize=48)


class RunningMean(nn.Module):
    """A loss that changes a buffer of its own with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(outputs, labels)
        self.mean.mul_(0.9).add_(loss.detach())
        return loss / self.mean


def test_a_loss_that_changes_a_buffer_is_refused_where_each_worker_calls_it_for_some_shards() -> None:
    given = {"model": nn.Linear(1, 1), "featureCols": ["x"], "labelCols": ["y"], "globalBatchSize": 48}
    layout, batch = Layout((Input(None, ("x",)),), ("y",)), {"x": torch.ones(7), "y": torch.ones(7)}
    plan_recipe(TorchEstimator(loss=RunningMean(), **given), layout, None).checked_on(batch)
    recipe = plan_recipe(TorchEstimator(loss=RunningMean(), deterministic=True, **given), layout, None)
    with pytest.raises(
        ValueError, match=r"deterministic=True .* RunningMean changes its buffer mean from shard to shard"
    ):
        recipe.checked_on(batch)


def test_steps_look_for_ignored_labels_where_no_weight_stands_for_them_and_facts_do_not_rule_them_out() -> None:
    layout, entropy = Layout((Input(None, ("x",)),), ("y", "z")), nn.CrossEntropyLoss()

    def looks(
        least: float | None, shards: int | None = None, width: int = 0, layout: Layout = layout, **more: Any
    ) -> bool:
        given = {"loss": entropy, **more}
        estimator = TorchEstimator(model=nn.Linear(1, 3), featureCols=["x"], labelCols=list(layout.labels), **given)
        facts = {} if least is None else {name: {"min": least} for name in "yz"}
        sample = {name: torch.zeros((2, width) if width else 2) for name in "yz"}
        found: bool = plan_recipe(estimator, layout, None).may_ignore(facts, shards, sample)
        return found

    assert looks(None)
    assert looks(5.0, width=5)
    assert looks(-100.0)
    assert looks(0.0, transform=dict)
    assert not looks(0.0)
    assert not looks(None, loss=nn.MSELoss())
    assert not looks(None, loss=None, trainStep=max)
    one = replace(layout, labels=("y",))
    assert not looks(None, layout=one)
    assert looks(None, shards=4, layout=one)
