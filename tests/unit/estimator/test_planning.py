"""What Params say together: the plan of a fit, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import ArrayType, DataType, LongType, MapType, StringType, StructField, StructType
from unstarted_fits import BY_STEPS, SCHEMA, data_of, make, recipe

from spark_elastic.estimator import TorchEstimator
from spark_elastic.estimator.batch_size import LEAST_SHARE, enough_workers, width_of
from spark_elastic.estimator.frame import check_columns
from spark_elastic.estimator.planning import (
    Sizes,
    added_columns,
    first_rows,
    given_batch,
    made_up_batch,
    plan_data,
    plan_shards,
    plan_sizes,
    plan_split,
    settle_batch,
)

ONE_CYCLE = torch.optim.lr_scheduler.OneCycleLR
MAP = MapType(StringType(), LongType())


class LearnedLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label).square().mean() * self.scale


class Noisy(torch.nn.Module):
    """A loss with noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label + torch.rand((), generator=self.generator)).square().mean()


def absolute(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs()  # [rows]


def test_a_loss_of_each_row_can_be_weighted_without_a_reduction() -> None:
    assert recipe(make(loss=absolute, weightCol="n")).layout.weight == "n"


def test_an_empty_name_leaves_out_a_column_that_may_be_left_out() -> None:
    estimator = TorchEstimator(validationIndicatorCol="", stratifyCol="")
    assert not plan_split(estimator, estimator.value("validationIndicatorCol") or None, SCHEMA).is_wanted


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"model": None}, "exactly one of model and modelFn"),
        ({"modelParams": {"n": 2}}, "modelParams={'n': 2} are for modelFn"),
        ({"schedulerParams": {"a": 1}}, "schedulerParams={'a': 1} need a scheduler"),
        (
            {"scheduler": ONE_CYCLE, "schedulerParams": {"max_lr": 1.0}},
            "OneCycleLR counts steps: give schedulerInterval='step'",
        ),
        (
            {"scheduler": ONE_CYCLE, "schedulerParams": {"max_lr": 1.0}, "schedulerInterval": "step", "batchSize": 8},
            "OneCycleLR has to know the steps of an epoch, which with batchSize .* give globalBatchSize, or stepsPerEpoch",
        ),
        ({"loss": None}, "give a loss, or a trainStep"),
        ({"balance": "auto", "batchSize": 8}, 'balance="auto" needs globalBatchSize'),
        ({"balance": "yes"}, "balance"),
        (
            {"zeroRedundancy": True, "optimizer": torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])},
            "zeroRedundancy=True .* give its class, not an instance",
        ),
        ({"shards": 4}, "shards=4 are for deterministic=True"),
        ({"deterministic": True, "batchSize": 8}, "deterministic=True needs globalBatchSize"),
        ({"deterministic": True, "globalBatchSize": 8, "shards": 9}, "shards=9 must be .* at most globalBatchSize=8"),
        ({"deterministic": True, "globalBatchSize": 8, "maxNp": 9}, "shards=8 must be at least maxNp=9"),
        ({"deterministic": True, "globalBatchSize": 8, "weightCol": "x"}, "weights the shards .* weightCol='x'"),
        (
            {"deterministic": True, "globalBatchSize": 8, "loss": Noisy()},
            "deterministic=True .* and loss draws from a Generator",
        ),
        ({"featureCols": ["z"]}, "featureCols: there is no column 'z'; the DataFrame has x, y"),
        ({"featureCols": ["text"]}, "column 'text' is string.*StringIndexer"),
        ({"labelCols": ["text"]}, "labelCols: column 'text' is string"),
        (
            {"featureCols": ["image"]},
            r"'image' is struct<data:binary>.*name one of its fields, as in 'image.data'",
        ),
        ({"featureCols": ["image.width"]}, "no column 'image.width'.*, and 'image' has data$"),
        ({"featureCols": ["matrix"]}, r"'matrix' is array<array<double>>.*flatten\('matrix'\) makes one list"),
        ({"weightCol": "list"}, "weightCol: column 'list' is array<double>; it must be one number"),
        ({"inputs": {"x": ["x"]}}, "exactly one of featureCols and inputs"),
        ({"featureCols": None}, "exactly one of featureCols and inputs"),
        (
            {"featureCols": None, "inputs": {"x": ["x"]}, "categoricalCols": ["code"]},
            r"with inputs, give them a keyword there: \{\"codes\": \(\['code'\], \"int64\"\)\}",
        ),
        ({"categoricalCols": ["z"]}, "categoricalCols: there is no column 'z'"),
        ({"categoricalCols": ["text"]}, r"categoricalCols: column 'text' is string.*StringIndexer makes numbers"),
        ({"categoricalCols": ["list"]}, r"categoricalCols: column 'list' is array<double>; it must be one number"),
        ({"stratifyCol": "text"}, "stratifyCol='text' is for validationFraction"),
        (
            {"stratifyCol": "z", "validationFraction": 0.1},
            "stratifyCol: there is no column 'z'; the DataFrame has x, y",
        ),
        ({"loss": [torch.nn.MSELoss()] * 2}, "2 losses, labels"),
        ({"lossWeights": [1.0, 2.0]}, "lossWeights"),
        ({"weightCol": "n", "loss": lambda output, label: output.mean()}, "a loss for each row: <lambda> has neither"),
        (
            {"model": torch.nn.LazyLinear(1)},
            "lazy layers, which learn their sizes from the first batch: call it on a batch",
        ),
        (
            {"model": torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1, 1))},
            "torch cannot pickle a network with torch.nn.utils.parametrizations",
        ),
        ({"loss": LearnedLoss()}, "LearnedLoss has parameters of its own, which no fit trains"),
        (
            {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)},
            "1 parameters that are not the model's",
        ),
        ({"optimizer": torch.optim.SGD, "optimizerParams": {"speed": 1}}, "speed"),
        ({"model": torch.nn.Linear(3, 1)}, "the model cannot be called with these columns"),
        (
            {"model": torch.nn.Linear(3, 1), "featureCols": ["x", "n"]},
            r"these columns: mat1 .*3x1\) \(columns x \[rows\] .*, n \[rows\] .*, side by side in one argument \[rows, 2\]\)",
        ),
        (
            {"model": torch.nn.Bilinear(1, 1, 1)},
            r"these columns: Bilinear.forward\(input1, input2\) takes another number of arguments \(columns x \[rows\] float32\)",
        ),
        ({"model": torch.nn.Linear(1, 4)}, "labels do not fit the loss.*shape"),
        ({"loss": torch.nn.CrossEntropyLoss(), "model": torch.nn.Linear(1, 1), "labelCols": ["y", "n"]}, "do not fit"),
    ],
)
def test_what_does_not_go_together_is_an_error_before_anything_is_started(params: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        recipe(make(**params))


@pytest.mark.parametrize("kind", [LongType(), StringType(), ArrayType(LongType()), VectorUDT()])
def test_classes_of_a_stratified_split_may_be_whatever_spark_can_sort(kind: DataType) -> None:
    schema = StructType([StructField("c", kind)])
    assert plan_split(make(stratifyCol="c", validationFraction=0.1), None, schema).stratify == "c"


class Variant(DataType):
    """Spark 4's VariantType, as far as the plan looks."""

    @classmethod
    def typeName(cls) -> str:  # noqa: N802
        return "variant"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (MAP, "map<string,bigint>"),
        (Variant(), "variant"),
        (ArrayType(StructType([StructField("m", MAP)])), "array<struct<m:map<string,bigint>>>"),
    ],
)
def test_a_stratified_split_by_what_spark_cannot_sort_is_an_error_that_names_the_column(
    kind: DataType, name: str
) -> None:
    schema = StructType([StructField("c", kind)])
    with pytest.raises(TypeError, match=f"stratifyCol: column 'c' is {name}, by which Spark cannot group rows"):
        plan_split(make(stratifyCol="c", validationFraction=0.1), None, schema)


def test_both_batch_sizes_are_an_error() -> None:
    with pytest.raises(ValueError, match="batchSize=8 or globalBatchSize=16, not both"):
        recipe(make(batchSize=8, globalBatchSize=16))


def test_relative_paths_are_those_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = plan_data(make(), ("train", "s3://bucket/validation"), {}, True)
    assert (data.training_url, data.validation_url) == (f"file://{tmp_path}/train", "s3://bucket/validation")


def test_the_estimators_model_and_optimizer_are_copied_together() -> None:
    model = torch.nn.Linear(1, 1)
    planned = recipe(make(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    assert planned.network is not model
    parameters = planned.steps.optimizer.param_groups[0]["params"]
    assert parameters[0] is next(planned.network.parameters())


def test_lists_have_no_shape_that_the_schema_tells() -> None:
    layout = make(featureCols=["list"])._layout(SCHEMA)
    assert made_up_batch(layout, SCHEMA) is None
    check_columns(SCHEMA, ["list"], "featureCols")


def test_a_driver_in_the_cluster_leaves_the_workers_two_slots_less() -> None:
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=4, master="yarn"), conf={})
    sizes = [plan_sizes(make(driver=driver), session) for driver in ("client", "cluster")]
    assert [(each.start, each.most) for each in sizes] == [(4, 4), (2, 2)]
    assert plan_sizes(make(driver="cluster", maxNp=4), session).most == 4
    with pytest.raises(ValueError, match=r"this cluster has 4 in all: too few for 3 workers.*give maxNp"):
        plan_sizes(make(driver="cluster", minNp=3), session)
    assert plan_sizes(make(driver="cluster", numProc=3, resourceProfile={"cpus": 1}), session).most == 3


def test_the_rows_are_those_that_the_loader_finds(tmp_path: Path) -> None:
    values = np.zeros(1_000)
    pq.write_table(pa.table({"x": values, "y": values}), tmp_path / "part.parquet", row_group_size=300)
    estimator = make()
    data = plan_data(estimator, (tmp_path.as_uri(), None), {}, False)
    sample, rows, _ = first_rows(estimator._layout(SCHEMA), data)
    assert (rows, width_of(sample)) == (1_000, 2)


@pytest.mark.parametrize(("training", "validation"), [([2, 2], [3]), ([1, 2], [2]), ([2, 2], [2])])
def test_lists_are_jagged_in_all_batches_if_any_row_for_training_or_validation_has_another_length(
    training: list[int], validation: list[int], tmp_path: Path
) -> None:
    urls = []
    for name, lengths in (("training", training), ("validation", validation)):
        lists = [[float(length)] * length for length in lengths]
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"list": lists, "y": np.ones(len(lists))}), tmp_path / name / "part.parquet")
        urls.append((tmp_path / name).as_uri())
    estimator = make(featureCols=["list"], labelCols=["y"])
    sample, _, data = first_rows(estimator._layout(SCHEMA), plan_data(estimator, (urls[0], urls[1]), {}, False))
    differ = len({*training, *validation}) > 1
    assert sample["list"].is_nested == differ
    for url in urls:
        (batch,) = data.open(url, batch_size=2, columns=["list"])
        assert batch["list"].is_nested == differ


def test_a_column_that_counts_rows_cannot_be_trained_on_where_files_are_read_as_they_are() -> None:
    layout, data = make(featureCols=["_row"])._layout_of_names(), plan_data(make(), ("train", None), {}, True)
    with pytest.raises(ValueError, match="column '_row' cannot be trained on by fit_on_parquet"):
        first_rows(layout, data)


def test_what_needs_a_global_batch_works_without_a_batch_size_and_not_with_that_of_workers() -> None:
    for params, error in (
        ({"balance": "auto"}, 'balance="auto" needs globalBatchSize'),
        ({"deterministic": True}, "deterministic=True needs globalBatchSize: with batchSize=8"),
        (BY_STEPS, "OneCycleLR has to know the steps of an epoch"),
    ):
        recipe(make(**params))
        with pytest.raises(ValueError, match=error):
            recipe(make(**params, batchSize=8))
    assert plan_shards(make(deterministic=True)) == 24
    assert plan_shards(make(deterministic=True, shards=48, maxNp=40)) == 48
    with pytest.raises(ValueError, match="shards=24 must be at least maxNp=25: a worker computes whole shards"):
        plan_shards(make(deterministic=True, maxNp=25))


def test_a_batch_size_that_is_given_counts() -> None:
    assert given_batch(make()) == {}
    assert given_batch(make(batchSize=8)) == {"batchSize": 8}
    assert given_batch(make(globalBatchSize=8)) == {"globalBatchSize": 8}
    earlier = make(globalBatchSize=8)
    earlier._setDefault(batchSize=32)  # as an estimator has it that an earlier release saved
    assert given_batch(earlier) == {"globalBatchSize": 8}
    assert given_batch(earlier.clear(earlier.globalBatchSize) or earlier) == {"batchSize": 32}


def test_the_loader_gets_the_picked_size_and_validation_follows_it() -> None:
    estimator = make()
    data, _ = settle_batch(estimator, data_of(estimator), Sizes(1, 2, 2), {"globalBatchSize": 128})
    assert (data.training["batch_size"], data.training["global_batch_size"]) == (None, 128)
    assert data.validation_batch_size is None
    data, _ = settle_batch(estimator, data_of(estimator), Sizes(1, 2, 2), {"batchSize": 32})
    assert (data.training["batch_size"], data.training["global_batch_size"]) == (32, None)
    assert data.validation_batch_size == 32
    validating = make(valBatchSize=9)
    assert (
        settle_batch(validating, data_of(validating), Sizes(1, 2, 2), {"batchSize": 32})[0].validation_batch_size == 9
    )


def test_workers_are_at_most_so_many_that_each_has_a_share_unless_params_ask_for_more() -> None:
    assert enough_workers(4 * LEAST_SHARE) == 4
    assert enough_workers(1) == 1
    slots, batch = Sizes(1, 20, 20), {"globalBatchSize": 64}

    def sizes(**params: Any) -> Sizes:
        return settle_batch(make(**params), data_of(make()), slots, batch)[1]

    assert sizes() == Sizes(1, 8, 8)
    assert sizes(numProc=12) == Sizes(1, 12, 12)
    assert sizes(minNp=9).most == 9
    assert sizes(maxNp=20) == slots
    assert settle_batch(make(), data_of(make()), Sizes(1, 2, 4), batch)[1] == Sizes(1, 2, 4)
    assert settle_batch(make(), data_of(make()), slots, {"batchSize": 32})[1] == slots


def test_a_balance_is_refused_for_a_run_that_goes_on_with_the_batch_size_of_workers() -> None:
    estimator = make(balance="auto")
    with pytest.raises(ValueError, match=r'balance="auto" needs globalBatchSize, .* with batchSize=32'):
        settle_batch(estimator, data_of(estimator), Sizes(1, 1, 1), {"batchSize": 32})


def test_output_columns_are_known_early_unless_several_labels_leave_them_to_the_network() -> None:
    def added(**params: Any) -> tuple[str, ...]:
        estimator = make(**params)
        return added_columns(estimator, estimator._layout_of_names())

    assert added() == ("prediction",)
    assert added(labelCols=["y", "z"]) == ()
    assert added(labelCols=["y", "z"], outputCols=["a", "b"]) == ("a", "b")
