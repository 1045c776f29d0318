"""What losses expect of labels and outputs; torch computes on where that does not hold."""

from __future__ import annotations

from functools import partial
from typing import Any

import networks
import numpy as np
import pytest
import torch
from pyspark.sql.types import DoubleType, StructField, StructType
from torch import nn

from spark_elastic.errors import DataError
from spark_elastic.estimator import TorchClassificationModel, TorchClassifier, TorchEstimator
from spark_elastic.estimator.expectations import are_probabilities, check_labels, probabilities_by
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.model import named_once
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.planning import plan_recipe
from spark_elastic.estimator.preflight import with_extremes
from spark_elastic.estimator.recipe import Recipe
from spark_elastic.estimator.row_checks import check_whole
from spark_elastic.estimator.shapes import ClassificationLoss, meet

SCHEMA = StructType([StructField(name, DoubleType()) for name in ("x", "label", "other")])
BATCH = {
    "x": torch.linspace(-1, 1, 7),
    "label": torch.tensor([0.0, 1, 0, 1, 0, 1, 0]),
    "other": torch.linspace(0, 2, 7),
}


def ending(*last: nn.Module, outputs: int = 2) -> nn.Module:
    """A network with the same weights in each run: those that come by chance may look like probabilities."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(1, outputs), *last)


def recipe(estimator: Any, batch: dict[str, torch.Tensor] = BATCH, *, labels_known: bool = True) -> Recipe:
    layout = estimator._layout(SCHEMA)
    planned = plan_recipe(estimator, layout, estimator._default_loss())
    return planned.checked_on(batch, labels_known=labels_known)


def classifier(model: nn.Module, **params: Any) -> TorchClassifier:
    return TorchClassifier(model=model, featuresCol="x", **params)


def estimator(model: nn.Module, loss: Any, *, labels: list[str] | None = None, **params: Any) -> TorchEstimator:
    return TorchEstimator(model=model, loss=loss, featureCols=["x"], labelCols=labels or ["label"], **params)


@pytest.mark.parametrize(
    ("model", "loss", "error"),
    [
        (
            ending(nn.Sigmoid(), outputs=1),
            None,
            r"ends in a sigmoid, and BCEWithLogitsLoss .* loss torch.nn.BCELoss\(\)",
        ),
        (ending(nn.Sigmoid(), nn.Flatten(0), outputs=1), None, "ends in a sigmoid"),
        (ending(nn.Softmax(1)), None, "ends in a softmax, and CrossEntropyLoss applies one itself.* leave it out"),
        (ending(nn.Softmax(1)), nn.CrossEntropyLoss(), "ends in a softmax"),
        (ending(nn.Softmax(1)), nn.functional.cross_entropy, "ends in a softmax, and cross_entropy"),
        (
            ending(nn.Softmax(1)),
            nn.NLLLoss(),
            r"NLLLoss takes logarithms .* end the network in torch.nn.LogSoftmax\(1\)",
        ),
        (ending(), nn.NLLLoss(), "NLLLoss takes logarithms"),
    ],
)
def test_an_output_that_the_loss_takes_for_something_else_is_an_error(model: nn.Module, loss: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        recipe(classifier(model, loss=loss))


@pytest.mark.parametrize(
    ("model", "loss", "error"),
    [
        (networks.OtherwiseInEvaluation(nn.Softmax(1)), None, "in evaluation the network ends in a softmax"),
        (
            networks.OtherwiseInEvaluation(nn.Softmax(1), nn.LogSoftmax(1)),
            nn.NLLLoss(),
            "in evaluation NLLLoss takes logarithms",
        ),
    ],
)
def test_an_output_that_only_validation_takes_for_something_else_is_an_error(
    model: nn.Module, loss: Any, error: str
) -> None:
    checked = recipe(classifier(model, loss=loss))
    with pytest.raises(ValueError, match=error):
        checked.check_evaluation(BATCH)
    assert model.training


def test_an_output_that_validation_takes_as_training_does_is_accepted() -> None:
    recipe(classifier(networks.OtherwiseInEvaluation(nn.Tanh()))).check_evaluation(BATCH)


def own_cross_entropy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return -output[torch.arange(len(output)), label.long()].log().mean()


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (ending(outputs=1), None),
        (ending(), None),
        (ending(nn.LogSoftmax(1)), None),
        (ending(nn.LogSoftmax(1)), nn.NLLLoss()),
        (ending(nn.Sigmoid(), outputs=1), nn.BCELoss()),
        (ending(nn.Softmax(1)), own_cross_entropy),
        (ending(nn.Softmax(1), nn.Linear(2, 2)), None),
    ],
)
def test_an_output_that_fits_its_loss_is_accepted(model: nn.Module, loss: Any) -> None:
    recipe(classifier(model, loss=loss))


@pytest.mark.parametrize(
    ("loss", "outputs", "labels", "error"),
    [
        (nn.BCEWithLogitsLoss(), 1, (-1, 1), "column 'label' has labels from -1 to 1; .* takes labels from 0 to 1"),
        (nn.functional.binary_cross_entropy_with_logits, 1, (0, 2), "takes labels from 0 to 1"),
        (nn.SoftMarginLoss(), 1, (0, 1), "SoftMarginLoss takes labels -1 and 1"),
        (nn.CrossEntropyLoss(), 3, (1, 3), "labels from 1 to 3; with 3 outputs a row, .* takes the classes 0 to 2"),
        (nn.CrossEntropyLoss(), 3, (-1, 2), "labels from -1 to 2"),
    ],
)
def test_labels_that_the_loss_makes_no_sense_of_are_an_error_wherever_they_are(
    loss: Any, outputs: int, labels: tuple[int, int], error: str
) -> None:
    """The first rows may all have labels that would do."""
    usual = {**BATCH, "label": torch.ones(7)}
    given = estimator(ending(outputs=outputs), loss)
    recipe(given, usual)
    with pytest.raises(ValueError, match=error):
        recipe(given, with_extremes(usual, ["label"], {"label": {"min": labels[0], "max": labels[1]}}))


def test_a_class_that_the_classifier_has_no_output_for_is_named_by_its_default_loss() -> None:
    with pytest.raises(ValueError, match=r"column 'label' has labels from 1 to 2; with 2 outputs a row, .* 0 to 1"):
        recipe(classifier(ending()), {**BATCH, "label": torch.tensor([1.0, 2, 1, 2, 1, 2, 1])})


def test_labels_that_fit_the_loss_and_labels_that_are_made_up_are_accepted() -> None:
    for loss, outputs, labels in (
        (nn.BCEWithLogitsLoss(), 1, (0.25, 1)),
        (nn.SoftMarginLoss(), 1, (-1, 1)),
        (nn.CrossEntropyLoss(), 2, (-100, 1)),
        (nn.CrossEntropyLoss(ignore_index=-1), 2, (-1, 1)),
    ):
        extremes = {"label": {"min": labels[0], "max": labels[1]}}
        recipe(
            estimator(ending(outputs=outputs), loss),
            with_extremes({**BATCH, "label": torch.ones(7)}, ["label"], extremes),
        )
    recipe(estimator(ending(outputs=1), nn.SoftMarginLoss()), {**BATCH, "label": torch.zeros(7)}, labels_known=False)


def summed(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().sum()


@pytest.mark.parametrize("loss", [nn.MSELoss(reduction="sum"), summed])
def test_a_loss_that_is_a_sum_over_rows_is_an_error(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"is a sum over rows, so that steps would depend on .* give a mean"):
        recipe(estimator(ending(outputs=1), loss))


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(reduction="none"),
        nn.HuberLoss(),
        lambda output, label: (output - label).square().mean(),
        lambda output, label: (output - label[:7]).square().mean(),
    ],
)
def test_a_mean_over_rows_and_a_loss_for_each_row_are_accepted(loss: Any) -> None:
    recipe(estimator(ending(outputs=1), loss))


@pytest.mark.parametrize(
    ("params", "error"),
    [
        (
            {"loss": lambda output, label: float(output.detach().mean())},
            "a loss must return a tensor, and <lambda> returned",
        ),
        (
            {"loss": lambda output, label: output.detach().mean()},
            "nothing can be learnt, because the loss has no gradient",
        ),
        (
            {"metrics": {"gap": lambda output, label: (output - label)[1:]}},
            "'gap' must return one number.* tensor of shape",
        ),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times in a step"),
        ({"optimizer": torch.optim.LBFGS, "zeroRedundancy": True}, "LBFGS computes the loss several times in a step"),
        (
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau, "schedulerInterval": "step"},
            "ReduceLROnPlateau follows the loss of an epoch: leave out schedulerInterval",
        ),
        (
            {"labels": ["label", "other"], "model": ending(), "lossWeights": [1.0, 9.0]},
            r"lossWeights=\[1.0, 9.0\] are for 2 losses.* return an output for each label",
        ),
    ],
)
def test_what_would_fail_or_do_nothing_in_the_workers_is_an_error_before(params: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        recipe(estimator(**{"model": ending(outputs=1), "loss": nn.MSELoss(), **params}))


def test_a_metric_that_fails_for_a_few_rows_is_left_to_the_workers_and_a_loss_keeps_its_state() -> None:
    def fails(output: torch.Tensor, label: torch.Tensor) -> float:
        raise ValueError("only one class")

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (output - label).square().mean()

    loss = Counting()
    recipe(estimator(ending(outputs=1), loss, metrics={"fails": fails}))
    assert loss.calls == 0


def test_parameters_without_a_gradient_are_found_unless_they_are_frozen() -> None:
    model = networks.HalfUsed(1)
    assert recipe(estimator(model, nn.MSELoss())).has_unused
    model.unused.requires_grad_(False)
    assert not recipe(estimator(model, nn.MSELoss())).has_unused


@pytest.mark.parametrize(
    ("last", "outputs", "found", "both"),
    [
        ([nn.Sigmoid()], 1, "sigmoid", True),
        ([nn.Sigmoid(), nn.Flatten(0)], 1, "sigmoid", True),
        ([nn.Sigmoid()], 3, "sigmoid", True),
        ([nn.Softmax(1)], 3, "softmax", True),
        ([nn.LogSoftmax(1)], 3, None, False),
        ([nn.Softmax(1), nn.Linear(3, 2)], 3, None, False),
    ],
)
def test_probabilities_are_known_by_the_last_step(
    last: list[nn.Module], outputs: int, found: str | None, both: bool
) -> None:
    output = ending(*last, outputs=outputs)(torch.linspace(-3, 3, 5).unsqueeze(1))
    assert (probabilities_by(output), bool(are_probabilities([output]))) == (found, both)


def test_probabilities_are_known_where_they_are_put_together_or_kept_from_0_and_1() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([1 - x.sigmoid(), x.sigmoid()], 1)

    class Kept(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sigmoid().clamp(1e-6, 1 - 1e-6)

    rows = torch.linspace(-3, 3, 5).unsqueeze(1)
    assert are_probabilities([ending(Both(), outputs=1)(rows)])
    assert are_probabilities([ending(Kept(), outputs=1)(rows)])
    assert not are_probabilities([ending(outputs=2)(torch.ones(5, 1) * 9)])


def test_a_torch_loss_tells_whether_outputs_are_probabilities() -> None:
    even = torch.tensor([[0.7, 0.3], [0.6, 0.4]])
    assert are_probabilities([even])
    for loss in (ClassificationLoss(), nn.CrossEntropyLoss(), partial(nn.functional.cross_entropy), nn.NLLLoss()):
        assert are_probabilities([even], loss) is False
    for loss in (nn.BCELoss(), partial(nn.functional.binary_cross_entropy)):
        assert are_probabilities([torch.tensor([[1.5], [-3.0]])], loss)


def test_where_it_is_not_clear_whether_outputs_are_probabilities_nobody_guesses() -> None:
    """A last layer that knows only a bias makes equal rows, and an average of sigmoids is no sigmoid."""
    assert are_probabilities([torch.tensor([[0.7, 0.3]] * 3)]) is None
    assert are_probabilities([torch.tensor([[0.7], [0.2]])]) is None
    model = TorchClassificationModel(model=ending(outputs=1))
    with pytest.warns(UserWarning, match="they are taken for logits, .*: set outputsAreProbabilities=True"):
        model._take_for_probabilities([torch.tensor([[0.7], [0.2]])])
    assert not model._gives_probabilities
    model.set(model.outputsAreProbabilities, True)
    model._take_for_probabilities([torch.tensor([[0.7], [0.2]])])
    assert model._gives_probabilities


def test_a_metric_may_return_a_number_for_each_row_which_weights_weigh() -> None:
    objective = Objective((nn.MSELoss(),), (), {"gap": lambda output, label: output - label})
    pairs = [(nn.MSELoss(), torch.tensor([1.0, 3.0]), torch.zeros(2))]
    layout = Layout((Input(None, ("x",)),), ("label",))
    assert objective.measure(layout, pairs) == {"gap": 2.0}  # type: ignore[arg-type]
    assert objective.measure(layout, pairs, torch.tensor([3.0, 1.0])) == {"gap": 1.5}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["loss", "rows", "val_loss", "val_gap"])
def test_a_metric_does_not_take_the_place_of_a_number_of_the_historys_own(name: str) -> None:
    given = estimator(ending(outputs=1), nn.MSELoss(), metrics={name: lambda output, label: 0.0})
    with pytest.raises(ValueError, match=f"metrics: '{name}' is a name of the history's own"):
        recipe(given)


@pytest.mark.parametrize(
    ("labels", "metrics", "words"),
    [
        (["label", "val_label"], ["gap"], "'val_label_gap' is a name of the history's own"),
        (["a", "a_b"], ["b_c", "c"], r"labels \['a', 'a_b'\] and metrics \['b_c', 'c'\] give the same name"),
    ],
)
def test_metrics_of_several_labels_do_not_take_each_others_names(
    labels: list[str], metrics: list[str], words: str
) -> None:
    objective = Objective((nn.MSELoss(),), (), dict.fromkeys(metrics), count=2)
    with pytest.raises(ValueError, match=words):
        objective.check_names(Layout((Input(None, ("x",)),), tuple(labels)))


def test_metrics_beside_a_step_without_a_loss_are_an_error() -> None:
    given = TorchEstimator(
        model=ending(outputs=1), trainStep=lambda model, batch, context: (torch.zeros(()), None), featureCols=["x"],
        labelCols=["label"], metrics={"gap": lambda output, label: 0.0},
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"metrics \['gap'\] are measured where a loss meets outputs and labels: give loss"
    ):
        recipe(given)


@pytest.mark.parametrize("where", [{"trainStep": lambda model, batch, context: torch.zeros(())}, {"useGpu": True}])
def test_columns_are_fitted_to_a_network_whose_steps_run_elsewhere(where: dict[str, Any]) -> None:
    """They came to scoring, and on GPUs to training, one by one, where the network takes them side by side."""
    one = recipe(estimator(ending(outputs=1), nn.MSELoss(), **where))
    assert [(entry.columns, entry.expand) for entry in one.layout.inputs] == [(("x",), True)]
    given = {"loss": nn.MSELoss(), "labelCols": ["label", "other"], "featureCols": ["x", "other"], **where}
    two = recipe(TorchEstimator(model=nn.Linear(2, 2), metrics={"gap": len}, **given))
    assert [entry.columns for entry in two.layout.inputs] == [("x", "other")]
    assert two.objective is not None
    assert two.objective.count == 1
    with pytest.raises(
        ValueError, match=r"the model cannot be called with these columns: .* \(columns x \[rows\] float32\)"
    ):
        recipe(estimator(nn.Linear(3, 1), nn.MSELoss(), **where))


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (torch.float64, r"its weights are float64, and fractional columns arrive as float32: call \.float\(\) on it$"),
        (
            torch.bfloat16,
            r"its weights are bfloat16, and .* on it, and give mixedPrecision to compute in a smaller type$",
        ),
    ],
)
def test_a_network_with_weights_of_another_type_is_refused_with_what_to_do(dtype: torch.dtype, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        recipe(estimator(nn.Linear(1, 1).to(dtype), nn.MSELoss()))
    with pytest.raises(ValueError, match=r"\(columns x \[rows\] float32\)$"):
        recipe(estimator(nn.Linear(3, 1).to(dtype), nn.MSELoss()))


def test_two_outputs_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="two outputs have the column 'p'"):
        named_once([("p", 0), ("p", 0)])


def test_whole_numbers_in_lists_are_whole_and_told_apart() -> None:
    with pytest.raises(DataError, match=r"column 'x' has the value 0\.5"):
        check_whole({"x": torch.tensor([[1.0, 0.5]])}, ["x"])
    with pytest.raises(DataError, match="inputs: column 'x' has the index 16777216"):
        check_whole({"x": torch.tensor([[1.0, 2.0**24]])}, ["x"])
    check_whole({"x": torch.tensor([[2.0**24 + 1]], dtype=torch.float64)}, ["x"])
    with pytest.raises(ValueError, match=r"CrossEntropyLoss takes class indexes, and a label is 0\.5"):
        meet(torch.zeros(2, 3, 4), torch.full((2, 4), 0.5), nn.CrossEntropyLoss())


def test_a_sigmoid_under_a_loss_of_ones_own_is_a_probability_and_no_logit() -> None:
    """Every probability is above 0, which as a logit means class 1."""
    network = ending(nn.Sigmoid(), outputs=1)
    given = classifier(network, loss=nn.functional.binary_cross_entropy)
    model = given._untrained(recipe(given), {"x": BATCH["x"]}).describe(model=network)
    given._look_at_outputs(model, {"x": BATCH["x"]})
    assert isinstance(model, TorchClassificationModel)
    probability = network(BATCH["x"].unsqueeze(1)).detach().numpy()
    np.testing.assert_allclose(model.predictProbability(BATCH["x"].numpy())[:, 1:], probability, rtol=1e-6)
    assert list(model.predict(BATCH["x"].numpy())) == list((probability[:, 0] > 0.5).astype(float))


def test_all_trailing_ones_are_dropped_which_would_be_broadcast_to_rows_times_rows() -> None:
    def own(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label).square().mean()

    output, label = meet(torch.ones(5, 1, 1), torch.zeros(5), own)
    assert output.shape == label.shape == (5,)
    output, label = meet(torch.ones(5), torch.zeros(5, 1, 1), own)
    assert output.shape == label.shape == (5,)


def test_a_partial_of_a_torch_loss_gets_the_labels_that_the_loss_takes() -> None:
    smooth = partial(nn.functional.cross_entropy, label_smoothing=0.1)
    assert meet(torch.zeros(3, 2), torch.tensor([0.0, 1.0, 1.0]), smooth)[1].dtype == torch.int64
    weighted = partial(nn.functional.binary_cross_entropy_with_logits, pos_weight=torch.tensor(2.0))
    assert meet(torch.zeros(3), torch.tensor([0, 1, 1]), weighted)[1].dtype == torch.float32
    with pytest.raises(ValueError, match="cross_entropy takes the classes 0 to 1"):
        check_labels(smooth, torch.zeros(3, 2), torch.tensor([0, 1, 2]), "y")
