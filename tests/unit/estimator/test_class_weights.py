"""Weights of classes: what the Param takes, how classes are counted, and that the loss is torch's own weighted one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional

from spark_elastic.errors import DataError
from spark_elastic.estimator import TorchClassifier
from spark_elastic.estimator.class_weights import count_classes, weights_of_classes
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.objective import Objective, label_weights
from spark_elastic.estimator.plan import DataPlan, StepPlan, TrainingPlan
from spark_elastic.estimator.planning import plan_recipe
from spark_elastic.estimator.runs import describe_callbacks
from spark_elastic.estimator.shapes import ClassificationLoss
from spark_elastic.estimator.training import train

X = torch.linspace(-1, 1, 20)
LABELS = torch.tensor([0] * 12 + [1] * 6 + [2] * 2)
WEIGHT = torch.arange(1.0, 21.0)


def written(folder: Path, labels: Sequence[float] = LABELS.tolist()) -> str:
    table = pa.table({"x": X.numpy(), "y": np.asarray(labels, np.float64), "w": WEIGHT.numpy()})
    pq.write_table(table, folder / "part.parquet", row_group_size=7)
    return folder.as_uri()


def plan(
    url: str, outputs: int, weights: tuple[float, ...], weight: str | None = None, loss: Any = None
) -> TrainingPlan:
    """One step on all rows, and one validation of them."""
    torch.manual_seed(0)
    return TrainingPlan(
        run_id="run", model=nn.Linear(1, outputs), layout=Layout((Input(None, ("x",), expand=True),), ("y",), weight),
        objective=Objective((loss or ClassificationLoss(),)),
        data=DataPlan(
            training_url=url, validation_url=url, batch_size=20, global_batch_size=None, validation_batch_size=6, shuffle=True,
            seed=0,
        ),
        steps=StepPlan(optimizer=torch.optim.SGD, optimizer_arguments={"lr": 0.5}),
        epochs=1, steps_per_epoch=None, checkpoint_steps=None, seed=0, callbacks=cloudpickle.dumps([]),
        callbacks_given=describe_callbacks([]), log_url=None, use_gpu=None, class_weights=weights,
    )  # fmt: skip


def weighted(model: nn.Module, labels: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """sum(w l) / sum(w), by torch's losses alone."""
    output = model(X.unsqueeze(1))
    each = (
        functional.binary_cross_entropy_with_logits(output[:, 0], labels.float(), reduction="none")
        if output.shape[1] == 1
        else functional.cross_entropy(output, labels, reduction="none")
    )
    return (each * factors).sum() / factors.sum()


@pytest.mark.parametrize(("outputs", "weights"), [(3, (0.5, 1.0, 4.0)), (2, (0.25, 3.0)), (1, (0.25, 3.0))])
@pytest.mark.parametrize("column", [None, "w"])
def test_loss_and_step_are_those_of_a_weighted_mean(
    tmp_path: Path, outputs: int, weights: tuple[float, ...], column: str | None
) -> None:
    labels = LABELS.clamp(max=max(outputs, 2) - 1)
    wanted = plan(written(tmp_path, labels.tolist()), outputs, weights, column)
    model = cloudpickle.loads(cloudpickle.dumps(wanted.model))
    found = train(wanted)
    assert found is not None

    factors = torch.tensor(weights)[labels] * (WEIGHT if column else 1.0)
    before = weighted(model, labels, factors)
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    assert found.history[0]["loss"] == pytest.approx(before.item(), rel=1e-5)
    assert found.history[0]["val_loss"] == pytest.approx(weighted(model, labels, factors).item(), rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found.weights[name], value)


def test_torchs_own_weighted_cross_entropy_is_the_same(tmp_path: Path) -> None:
    url, weights = written(tmp_path), (0.5, 1.0, 4.0)
    mine = train(plan(url, 3, weights, loss=nn.CrossEntropyLoss()))
    theirs = train(plan(url, 3, (), loss=nn.CrossEntropyLoss(weight=torch.tensor(weights))))
    assert mine is not None
    assert theirs is not None
    for name, value in theirs.weights.items():
        torch.testing.assert_close(mine.weights[name], value)


def test_where_a_loss_weighs_labels_batches_count_by_these_and_ignored_labels_not_at_all(tmp_path: Path) -> None:
    """One step on all rows, validated in batches of 6 rows, and one step in two passes of 10 rows, of which 8 are ignored."""
    weights = torch.tensor([0.5, 1.0, 4.0])
    loss = nn.CrossEntropyLoss(weight=weights, ignore_index=0)
    wanted = replace(plan(written(tmp_path), 3, (), loss=loss), weighs_labels=True)
    model = cloudpickle.loads(cloudpickle.dumps(wanted.model))
    found = train(wanted)
    assert found is not None
    expected = loss(model(X.unsqueeze(1)), LABELS)
    expected.backward()
    assert found.history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(found.weights["bias"], (model.bias - 0.5 * model.bias.grad).detach())
    with torch.no_grad():
        model.load_state_dict(found.weights)
        assert found.history[0]["val_loss"] == pytest.approx(loss(model(X.unsqueeze(1)), LABELS).item(), rel=1e-5)


def test_labels_of_which_all_are_ignored_are_an_error(tmp_path: Path) -> None:
    url = written(tmp_path, [0] * 20)
    wanted = replace(plan(url, 3, (), loss=nn.CrossEntropyLoss(ignore_index=0)), weighs_labels=True)
    with pytest.raises(
        DataError, match=r"all weights of rows \(loss: the weights of labels, of which some are ignored\)"
    ):
        train(wanted)


def test_weights_within_a_loss_are_those_of_its_labels() -> None:
    weights = torch.tensor([0.5, 1.0, 4.0])
    labels = torch.tensor([[0, 2], [1, -100]])
    loss = nn.CrossEntropyLoss(weight=weights)
    assert label_weights(loss, labels).tolist() == [4.5, 1.0]  # type: ignore[union-attr]
    assert label_weights(functools.partial(functional.cross_entropy, weight=weights), labels[:, 0]).tolist() == [
        0.5,
        1.0,
    ]  # type: ignore[union-attr]
    assert label_weights(nn.CrossEntropyLoss(), labels).tolist() == [2.0, 1.0]  # type: ignore[union-attr]
    assert label_weights(loss, torch.full((2, 3), 1 / 3)) is None
    assert label_weights(nn.MSELoss(), labels) is None


def test_the_loss_of_a_classifier_ignores_no_label() -> None:
    with pytest.raises(IndexError, match="Target -100 is out of bounds"):
        ClassificationLoss()(torch.zeros(2, 3), torch.tensor([0, -100]))


def test_a_label_without_a_weight_is_an_error_that_names_it(tmp_path: Path) -> None:
    url = written(tmp_path)
    with pytest.raises(
        DataError, match="classWeights: column 'y' has the label 2; the network has the 2 classes from 0 to 1"
    ):
        train(plan(url, 3, (1.0, 2.0)))


def test_classes_without_any_weight_are_an_error(tmp_path: Path) -> None:
    url = written(tmp_path, [0] * 20)
    with pytest.raises(
        DataError, match=r"all weights of rows \(classWeights\) are 0 in the rows of this epoch's training"
    ):
        train(plan(url, 2, (0.0, 1.0)))


# ---------------------------------------------------------------- the Param


def never() -> Sequence[int]:
    raise AssertionError("nothing has to be counted")


def test_a_list_has_a_number_for_each_class() -> None:
    assert weights_of_classes([1.0, 2.0], 2, never) == (1.0, 2.0)
    with pytest.raises(ValueError, match=r"one number for each of 3 classes, not \[1.0, 2.0\]"):
        weights_of_classes([1.0, 2.0], 3, never)


def test_a_dict_names_the_classes_whose_weight_is_not_1() -> None:
    assert weights_of_classes({2: 5.0}, 3, never) == (1.0, 1.0, 5.0)
    with pytest.raises(ValueError, match="there is no class 3; the network has the 3 classes from 0 to 2"):
        weights_of_classes({3: 5.0}, 3, never)


def test_balanced_is_what_scikit_learn_computes() -> None:
    # compute_class_weight("balanced", …) is rows / (classes that occur * rows of the class)
    assert weights_of_classes("balanced", 3, lambda: [12, 6, 2]) == pytest.approx((20 / 36, 20 / 18, 20 / 6))
    assert weights_of_classes("balanced", 3, lambda: [15, 5, 0]) == pytest.approx((20 / 30, 20 / 10, 1.0))


def test_classes_are_counted_in_the_training_data(tmp_path: Path) -> None:
    data = plan(written(tmp_path), 3, ()).data
    assert count_classes("y", data, 4) == [12, 6, 2, 0]
    assert count_classes("y", replace(data, check=True), 3) == [12, 6, 2]
    with pytest.raises(DataError, match="column 'y' has the label 2"):
        count_classes("y", data, 2)


def test_a_fraction_cannot_be_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'y' has the label 0\.5"):
        count_classes("y", plan(written(tmp_path, [0.5] * 20), 3, ()).data, 3)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"deterministic": True, "globalBatchSize": 8}, "weights the shards .* classWeights="),
        ({"trainStep": max}, "a trainStep computes its own"),
        ({"transform": dict}, "counts the labels of the data, which the transform may change"),
        ({"loss": lambda output, label: output.mean()}, "weights need a loss for each row: <lambda> has neither"),
    ],
)
def test_what_does_not_go_with_it_is_refused(params: dict[str, Any], message: str) -> None:
    classifier = TorchClassifier(
        model=nn.Linear(1, 2), featuresCol="x", labelCol="y", classWeights="balanced", **params
    )
    layout, rows = classifier._layout_of_names(), {"x": torch.zeros(2, 1), "y": torch.zeros(2)}
    with pytest.raises(ValueError, match=message):
        plan_recipe(classifier, layout, classifier._default_loss()).checked_on(rows)
