"""Columns of indexes of categories: how they reach the network, and which indexes are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql.types import DoubleType, LongType, StructField, StructType

from spark_elastic.errors import DataError
from spark_elastic.estimator import TorchClassifier, TorchEstimator, TorchModel, TorchRegressionModel
from spark_elastic.estimator.estimator import _check_facts
from spark_elastic.estimator.layout import Input, Layout, positional_inputs
from spark_elastic.estimator.model import Flat
from spark_elastic.estimator.planning import made_up_batch, plan_recipe
from spark_elastic.estimator.row_checks import check_indexes
from spark_elastic.estimator.transform import Scorer

SCHEMA = StructType(
    [
        StructField("x", DoubleType()),
        StructField("y", DoubleType()),
        StructField("carrier", LongType()),
        StructField("dest", DoubleType()),
    ]
)
CATEGORIES = ["carrier", "dest"]


class Codes(torch.nn.Module):
    """The sum of x and, for each row, of ten times its carrier and of its destination."""

    def __init__(self) -> None:
        super().__init__()
        self.carrier = torch.nn.Embedding.from_pretrained(10.0 * torch.arange(3.0)[:, None], freeze=False)
        self.dest = torch.nn.Embedding.from_pretrained(torch.arange(5.0)[:, None], freeze=False)

    def forward(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        assert codes.dtype == torch.int64
        assert codes.shape[1] == 2
        return x.reshape(-1) + self.carrier(codes[:, 0])[:, 0] + self.dest(codes[:, 1])[:, 0]


class OnlyCodes(torch.nn.Module):
    """Takes categories alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, 1)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.table(codes).sum((1, 2))


class Parity(torch.nn.Module):
    """Tells whether the sum of a row's indexes is odd."""

    def forward(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return codes.sum(1) % 2


def rows(**columns: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in columns.items()}


LAYOUT = Layout(tuple(positional_inputs(["x"], CATEGORIES)), ("y",))


def regressor(**params: Any) -> TorchEstimator:
    given: dict[str, Any] = {
        "model": Codes(), "loss": torch.nn.MSELoss(), "featureCols": ["x"], "categoricalCols": CATEGORIES, "labelCols": ["y"],
        **params,
    }  # fmt: skip
    return TorchEstimator(**{name: value for name, value in given.items() if value is not None})


def planned(estimator: Any) -> Any:
    layout = estimator._layout(SCHEMA)
    batch = made_up_batch(layout, SCHEMA)
    assert batch is not None
    return plan_recipe(estimator, layout, estimator._default_loss()).checked_on(batch)


def test_they_are_one_argument_of_int64_behind_the_features() -> None:
    batch = rows(x=[1.0, 2.0], carrier=[2, 0], dest=[4.0, 1.0])
    assert LAYOUT.features == ["x", "carrier", "dest"]
    assert LAYOUT.categories == CATEGORIES
    assert LAYOUT.call(Codes(), batch).tolist() == [25.0, 3.0]


@pytest.mark.parametrize(
    "estimator",
    [
        regressor(),
        regressor(model=OnlyCodes(), featureCols=None, categoricalCols=["carrier"]),
        TorchClassifier(model=Codes(), featuresCol="x", labelCol="y", categoricalCols=CATEGORIES),
    ],
    ids=["estimator", "categories alone", "classifier"],
)
def test_all_estimators_take_them(estimator: Any) -> None:
    assert planned(estimator).layout.categories == estimator.getCategoricalCols()


def test_the_largest_index_of_the_data_is_tried_before_training_and_names_its_column() -> None:
    recipe = planned(regressor())
    batch = rows(x=[1.0], carrier=[0], dest=[0.0], y=[0.0])
    recipe.check_categories(batch, {"carrier": {"max": 2.0}, "dest": {"max": 4.0}})
    recipe.check_categories(batch, {})
    with pytest.raises(ValueError, match=r"too few categories .* 'dest' up to 5 \(index out of range in self\)"):
        recipe.check_categories(batch, {"carrier": {"max": 2.0}, "dest": {"max": 5.0}})


@pytest.mark.parametrize(("least", "fraction", "shown"), [(-1.0, None, "-1"), (0.0, 2.5, "2.5")])
def test_numbers_that_are_no_indexes_are_refused_by_what_writing_the_data_found_out(
    least: float, fraction: float | None, shown: str
) -> None:
    facts = {name: {"min": 0.0, "max": 3.0, "fraction": None} for name in ("x", "y", *CATEGORIES)}
    _check_facts(SCHEMA, LAYOUT, facts)
    with pytest.raises(
        ValueError, match=f"column 'dest' has the index {shown}; indexes of categories are whole numbers"
    ):
        _check_facts(SCHEMA, LAYOUT, {**facts, "dest": {"min": least, "max": 3.0, "fraction": fraction}})


@pytest.mark.parametrize(("value", "shown"), [(-1.0, "-1"), (0.5, "0.5")])
def test_numbers_that_are_no_indexes_are_refused_in_rows(value: float, shown: str) -> None:
    with pytest.raises(DataError, match=f"column 'dest' has the index {shown}"):
        check_indexes(rows(carrier=[1], dest=[value]), CATEGORIES)
    scorer = Scorer(Codes(), LAYOUT, Flat([("z", 0)]))
    with pytest.raises(DataError, match=f"column 'dest' has the index {shown}"):
        scorer({"x": np.ones(1), "carrier": np.ones(1, np.int64), "dest": np.array([value])})


def test_indexes_that_floats_would_merge_are_refused_and_are_right_in_a_column_of_whole_numbers() -> None:
    facts = {name: {"min": 0.0, "max": 3.0, "fraction": None} for name in ("x", "y", *CATEGORIES)}
    large, merged = (
        {"min": 0.0, "max": 2.0**24, "fraction": None},
        "'dest' has the index 16777216 .* cast the column to long",
    )
    _check_facts(SCHEMA, LAYOUT, {**facts, "carrier": large, "dest": {**large, "max": 2.0**24 - 1}})
    with pytest.raises(ValueError, match=merged):
        _check_facts(SCHEMA, LAYOUT, {**facts, "dest": large})
    check_indexes(rows(carrier=[2**24 + 1], dest=[2.0**24 - 1]), CATEGORIES)
    with pytest.raises(DataError, match=merged):
        check_indexes(rows(carrier=[1], dest=[2.0**24]), CATEGORIES)
    columns = {"x": np.zeros(2), "carrier": np.array([2**24, 2**24 + 1]), "dest": np.zeros(2)}
    assert Scorer(Parity(), LAYOUT, Flat([("z", 0)]))(columns)["z"].tolist() == [0, 1]
    with pytest.raises(DataError, match=r"'dest' has the index 16777217 .* cast the column to long"):
        Scorer(Parity(), LAYOUT, Flat([("z", 0)]))({**columns, "dest": np.array([0.0, 2.0**24 + 1])})


def test_an_index_that_training_has_not_seen_is_an_error_of_scoring_and_other_errors_stay_as_they_are() -> None:
    scorer = Scorer(Codes(), LAYOUT, Flat([("z", 0)]))
    good = {"x": np.ones(2), "carrier": np.array([1, 2]), "dest": np.array([0.0, 4.0])}
    assert scorer(good)["z"].tolist() == [11.0, 25.0]
    with pytest.raises(
        DataError, match=r"'carrier' up to 3, 'dest' up to 4 .* one more where StringIndexer keeps strings"
    ):
        scorer({**good, "carrier": np.array([3, 1])})

    def broken(values: torch.Tensor) -> torch.Tensor:
        return values[[7]]

    with pytest.raises(IndexError):
        Layout((Input(None, ("x",)),)).call(broken, rows(x=[1.0]))


def test_a_model_scores_other_columns_of_categories_and_predicts_one_row() -> None:
    model = TorchRegressionModel(Codes(), featuresCol="x", categoricalCols=CATEGORIES)
    model.describe(layout=LAYOUT, shapes={"x": (), "carrier": (), "dest": ()}, widths=[0])
    assert model.predict(1.0, [2, 4]) == 25.0
    assert model.predict([1.0, 2.0], [[2, 4], [0, 1]]).tolist() == [25.0, 3.0]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"categories must have an index for each of \['carrier', 'dest'\]"):
        model.predict(1.0)
    model.setCategoricalCols(["a", "b"]).setFeaturesCol("z")
    assert model.layout.features == ["z", "a", "b"]
    assert model.shapes == {"z": (), "a": (), "b": ()}
    with pytest.raises(ValueError, match=r"the model takes 2 columns, \['a', 'b'\], and cannot take \['a'\]"):
        model.setCategoricalCols(["a"])


def test_a_network_from_elsewhere_takes_them() -> None:
    model = TorchModel(OnlyCodes(), categoricalCols=["carrier"], outputCols=["y"])
    assert model._layout_of_names().inputs == (Input(None, ("carrier",), "int64", categorical=True),)


ARGUMENTS = [
    (Input(None, ("x",)), "x [rows]"),
    (Input(None, ("x",), expand=True), "x [rows, 1]"),
    (Input(None, ("x", "v"), expand=True), "(x, v) [rows, 4]"),
    (Input(None, ("carrier",), "int64", categorical=True), "carrier [rows, 1]"),
    (Input(None, ("carrier", "dest"), "int64", categorical=True), "(carrier, dest) [rows, 2]"),
    (Input("ids", ("carrier",), "int64"), "ids=carrier [rows, 1]"),
    (Input("ids", ("carrier", "v")), "ids=(carrier, v) [rows, 4]"),
    (Input(None, ("lists",)), "lists [rows, lists]"),
]


@pytest.mark.parametrize(("argument", "told"), ARGUMENTS, ids=[told for _, told in ARGUMENTS])
def test_a_model_explains_each_argument_as_forward_gets_it(argument: Input, told: str) -> None:
    shapes: dict[str, tuple[int, ...] | None] = {"x": (), "v": (3,), "carrier": (), "dest": (), "lists": None}
    model = TorchModel(OnlyCodes()).describe(layout=Layout((argument,)), shapes=shapes, widths=[0])
    assert model.explain().splitlines()[1] == f"inputs: {told}; outputs: [rows]"
    if argument.columns != ("lists",):
        batch = {name: torch.zeros((7, *shape)) for name, shape in shapes.items() if shape is not None}
        (given,) = [*model.layout.arguments(batch)[0], *model.layout.arguments(batch)[1].values()]
        assert told.endswith(f"[{', '.join(['rows', *map(str, given.shape[1:])])}]"), "which is what forward gets"
