"""Outputs, labels and columns meet in the shapes and dtypes that models and losses take."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.shapes import ClassificationLoss, meet

ROWS = 5


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(ROWS, *shape, dtype=dtype)


@pytest.mark.parametrize(("output", "label"), [((1,), ()), ((), (1,)), ((), ()), ((3,), (3,)), ((2, 1), (2,))])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), functional.l1_loss])
def test_a_trailing_one_is_squeezed_to_the_other_shape(
    output: tuple[int, ...], label: tuple[int, ...], loss: object
) -> None:
    met_output, met_label = meet(zeros(*output), zeros(*label, dtype=torch.int64), loss)
    assert met_output.shape == met_label.shape
    assert met_label.dtype == met_output.dtype == torch.float32


@pytest.mark.parametrize("label", [zeros(), zeros(1), zeros(dtype=torch.int64)])
def test_class_index_losses_get_whole_numbers(label: torch.Tensor) -> None:
    output, met = meet(zeros(3), label, nn.CrossEntropyLoss())
    assert met.dtype == torch.int64
    assert met.shape == (ROWS,)
    nn.CrossEntropyLoss()(output, met)


def test_probabilities_of_classes_stay_as_they_are() -> None:
    label = torch.full((ROWS, 3), 1 / 3)
    assert meet(zeros(3), label, nn.CrossEntropyLoss())[1] is label


@pytest.mark.parametrize(
    ("output", "label", "loss"),
    [((3,), (), nn.MSELoss()), ((), (3,), nn.BCEWithLogitsLoss()), ((3,), (3, 2), nn.CrossEntropyLoss())],
)
def test_shapes_that_torch_would_broadcast_are_an_error(
    output: tuple[int, ...], label: tuple[int, ...], loss: nn.Module
) -> None:
    with pytest.raises(ValueError, match=r"the label's shape does not fit the loss: the label has shape \[rows"):
        meet(zeros(*output), zeros(*label), loss)


def test_half_precision_outputs_are_measured_in_full() -> None:
    assert meet(zeros(1).bfloat16(), zeros(), nn.MSELoss())[0].dtype == torch.float32


def test_the_classification_loss_takes_one_logit_or_one_for_each_class() -> None:
    labels = torch.tensor([0, 1, 1, 0, 1])
    logit = torch.linspace(-1, 1, ROWS)
    pair = torch.stack([torch.zeros(ROWS), logit], 1)
    assert ClassificationLoss()(logit, labels).item() == pytest.approx(ClassificationLoss()(pair, labels).item())


@pytest.mark.parametrize("output", [zeros(), zeros(2)])
def test_metrics_beside_the_classification_loss_get_whole_numbers(output: torch.Tensor) -> None:
    assert meet(output, torch.ones(ROWS), ClassificationLoss())[1].dtype == torch.int64


def test_soft_labels_meet_one_logit_and_no_others() -> None:
    soft = torch.full((ROWS,), 0.9)
    assert meet(zeros(), soft, ClassificationLoss())[1] is soft
    for loss in (ClassificationLoss(), nn.CrossEntropyLoss()):
        with pytest.raises(ValueError, match=r"takes class indexes, and a label is 0\.9"):
            meet(zeros(2), soft, loss)


def test_the_weighted_loss_is_the_weighted_mean_over_rows() -> None:
    layout = Layout((Input(None, ("x",)),), ("y",), "w")
    batch = {"y": torch.tensor([0.0, 1.0, 2.0]), "w": torch.tensor([1.0, 0.0, 3.0])}
    for loss in (nn.MSELoss(), functional.mse_loss):
        objective = Objective((loss,))
        pairs = objective.pairs(layout, torch.zeros(3, 1), batch)
        assert objective.loss(pairs, batch["w"]).item() == pytest.approx((0 * 1 + 4 * 3) / 4)
        assert objective.loss(pairs, None).item() == pytest.approx(5 / 3)


def test_labels_stand_side_by_side_where_one_output_meets_several() -> None:
    layout = Layout((Input(None, ("x",)),), ("y", "z"))
    batch = {"y": zeros(), "z": zeros(dtype=torch.int64)}
    assert [label.shape for _, _, label in Objective((nn.MSELoss(),)).pairs(layout, zeros(2), batch)] == [(ROWS, 2)]
    pairs = Objective((nn.MSELoss(),), (2.0, 1.0)).pairs(layout, (zeros(), zeros(1)), batch)
    assert [label.shape for _, _, label in pairs] == [(ROWS,), (ROWS,)]
    with pytest.raises(ValueError, match="1 outputs for 2 labels"):
        Objective((nn.MSELoss(), nn.MSELoss())).pairs(layout, zeros(1), batch)
