"""Params: conversion, names, errors before any Spark job; none of this needs a JVM."""

from __future__ import annotations

import inspect
import json
import pickle
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from pyspark.ml.classification import ProbabilisticClassificationModel, ProbabilisticClassifier
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.regression import RegressionModel, Regressor
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from spark_elastic.errors import DamagedError
from spark_elastic.estimator import (
    EarlyStopping,
    Store,
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from spark_elastic.estimator.dataset import check_names
from spark_elastic.estimator.description import describe
from spark_elastic.estimator.estimator import _check_classes
from spark_elastic.estimator.frame import check_columns, is_index
from spark_elastic.estimator.persistence import ModelWriter
from spark_elastic.estimator.planning import (
    made_up_batch,
    plan_data,
    plan_recipe,
    plan_sizes,
    plan_split,
)
from spark_elastic.estimator.recipe import own_randomness
from spark_elastic.estimator.runs import VERSION, RunRecord, describe_params, read_record
from spark_elastic.estimator.slots import SlotLedger
from spark_elastic.launchers.session import check_gpus
from spark_elastic.loggers import TensorBoardLogger

SCHEMA = StructType(
    [
        StructField("x", DoubleType()),
        StructField("y", DoubleType()),
        StructField("n", LongType()),
        StructField("text", StringType()),
        StructField("list", ArrayType(DoubleType())),
        StructField("matrix", ArrayType(ArrayType(DoubleType()))),
        StructField("image", StructType([StructField("data", BinaryType())])),
        StructField("code", DoubleType(), metadata={"ml_attr": {"type": "nominal", "vals": ["a", "b"]}}),
    ]
)


def make(**params: Any) -> TorchEstimator:
    given = {
        "model": torch.nn.Linear(1, 1),
        "loss": torch.nn.MSELoss(),
        "featureCols": ["x"],
        "labelCols": ["y"],
        **params,
    }
    return TorchEstimator(**{name: value for name, value in given.items() if value is not None})


def recipe(estimator: TorchEstimator) -> Any:
    layout = estimator._layout(SCHEMA)
    plan_split(estimator, estimator.value("validationIndicatorCol"), SCHEMA)
    planned = plan_recipe(estimator, layout, estimator._default_loss())
    batch = made_up_batch(layout, SCHEMA)
    return planned if batch is None else planned.checked_on(batch)


class LearnedLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label).square().mean() * self.scale


def absolute(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs()  # [rows]


def test_a_loss_of_each_row_can_be_weighted_without_a_reduction() -> None:
    assert recipe(make(loss=absolute, weightCol="n")).layout.weight == "n"


STAGES = [TorchEstimator, TorchClassifier, TorchRegressor, TorchModel, TorchClassificationModel, TorchRegressionModel]


@pytest.mark.parametrize("kind", STAGES)
def test_stages_have_what_sparks_own_tests_ask_of_params(kind: Any) -> None:
    """What pyspark.testing.mlutils.check_params and test_param.py ask, as far as a stage without a Java twin can have it."""
    stage = kind()
    names = [param.name for param in stage.params]
    assert names == sorted(names)
    assert {param.parent for param in stage.params} == {stage.uid}
    assert stage.uid.startswith(f"{kind.__name__}_")
    assert kind().uid != stage.uid
    for param in stage.params:
        assert stage.hasParam(param.name)
        assert stage.getParam(param.name) == param == getattr(stage, param.name)
        assert param.doc in stage.explainParam(param)
        assert not stage.isSet(param)
        assert stage.isDefined(param) == stage.hasDefault(param)
    size = stage.transformBatchSize if hasattr(stage, "transformBatchSize") else stage.batchSize
    changed = stage.copy({size: 5})
    assert (changed.uid, changed.getOrDefault(size), stage.isSet(size)) == (stage.uid, 5, False)
    assert stage.extractParamMap({size: 6})[size] == 6
    changed.clear(size)
    assert changed.getOrDefault(size) == stage.getOrDefault(size)
    changed._resetUid("other")
    assert {param.parent for param in changed.params} == {"other"}
    assert changed.explainParams().count("\n") >= len(names) - 1


@pytest.mark.parametrize("kind", STAGES)
def test_stages_are_pickled_by_plain_pickle_as_other_tools_do(kind: Any) -> None:
    network = torch.nn.Linear(1, 1)
    is_model = not hasattr(kind, "fit")
    stage = kind(model=network) if is_model else kind(model=network, epochs=3, validationFraction=0.5, balance="auto")
    stage.setParams(transformBatchSize=7)
    again = pickle.loads(pickle.dumps(stage))
    assert type(again) is kind
    assert (again.uid, again.params) == (stage.uid, stage.params)
    assert {param.name for param in again.params if again.isSet(param)} == {
        param.name for param in stage.params if stage.isSet(param)
    }
    assert torch.equal((again.model if is_model else again.value("model")).weight, network.weight)
    assert again.value("transformBatchSize") == 7
    with pytest.raises(TypeError, match="transformBatchSize: must be a whole number, not 'x'"):
        again.setParams(transformBatchSize="x")


ONE_CYCLE = torch.optim.lr_scheduler.OneCycleLR


def test_a_seed_may_be_as_large_as_spark_can_store_it_and_no_larger() -> None:
    assert TorchEstimator(seed=2**63 - 1).getSeed() == 2**63 - 1
    with pytest.raises(ValueError, match="seed: must be a whole number up to 9223372036854775807"):
        TorchEstimator(seed=2**63)


def test_an_empty_name_leaves_out_a_column_that_may_be_left_out() -> None:
    estimator = TorchEstimator(validationIndicatorCol="", stratifyCol="")
    assert not plan_split(estimator, estimator.value("validationIndicatorCol") or None, SCHEMA).is_wanted


SETTINGS = {
    "model": torch.nn.Linear(1, 1), "modelFn": torch.nn.Linear, "modelParams": {"in_features": 1}, "optimizer": torch.optim.SGD,
    "optimizerParams": {"momentum": 0.5}, "learningRate": 0.5, "loss": torch.nn.L1Loss(), "stratifyCol": "n",
    "lossWeights": [1.0, 2.0],
    "metrics": {"mae": torch.nn.L1Loss()}, "categoricalCols": ["code"], "featureCols": ["x"],
    "inputs": {"x": ["x", "n"], "code": [["n"], "int64"]},
    "labelCols": ["y"], "outputCols": ["score"], "weightCol": "n", "validationIndicatorCol": "n", "featuresCol": "f",
    "labelCol": "l", "predictionCol": "p", "rawPredictionCol": "r", "probabilityCol": "pr", "thresholds": [0.4, 0.6],
    "numClasses": 3, "outputsAreProbabilities": True, "classWeights": [1.0, 0.0, 2.5],
    "batchSize": 7, "globalBatchSize": 8, "deterministic": True, "shards": 4, "balance": "auto", "valBatchSize": 9,
    "replaceSlow": 0.1, "adaptiveNp": False, "transformBatchSize": 10, "epochs": 11,
    "stepsPerEpoch": 12, "validationFraction": 0.25, "minNp": 2, "numProc": 3, "maxNp": 4, "resetLimit": 5, "startTimeout": 1.5,
    "elasticTimeout": 2.5, "hangTimeout": 3.5, "driver": "cluster", "eventLogDir": "/logs",
    "store": Store.create("/x"), "runId": "run",
    "reuseData": False, "checkpointSteps": 6, "commitSteps": 7, "zeroRedundancy": True, "callbacks": [EarlyStopping()],
    "loggers": [TensorBoardLogger("logs")], "backwardPassesPerStep": 2, "findUnusedParameters": True,
    "gradientClipNorm": 4.5, "gradientClipValue": 5.5, "mixedPrecision": "bf16", "scheduler": torch.optim.lr_scheduler.StepLR,
    "schedulerParams": {"step_size": 1}, "schedulerInterval": "step", "transform": dict, "trainStep": max, "shuffle": False,
    "seed": 13, "engine": "petastorm", "readers": 14, "useGpu": True,
    "resourceProfile": {"cpus": 2, "gpus": 1}, "terminateOnNaN": False, "verbose": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", [TorchEstimator, TorchClassifier, TorchRegressor])
def test_every_param_is_a_keyword_and_has_a_getter_a_setter_and_an_explanation(kind: Any) -> None:
    given = {param.name: SETTINGS[param.name] for param in kind().params}
    by_keyword, by_setter = kind(**given), kind()
    for name, value in given.items():
        title = name[0].upper() + name[1:]
        assert getattr(by_keyword, f"get{title}")() == value, name
        assert getattr(by_setter, f"set{title}")(value) is by_setter
        assert getattr(by_setter, f"get{title}")() == value, name
    explained = by_keyword.explainParams()
    assert all(f"{param.name}: {param.doc}" in explained and param.doc for param in by_keyword.params)
    assert "epochs: passes over the data (default: 1, current: 11)" in explained
    assert all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(kind).parameters.values())


def test_params_are_set_copied_and_unknown_ones_refused() -> None:
    estimator = make(batchSize=16).setEpochs(3).setParams(seed=5)
    assert (estimator.getBatchSize(), estimator.getEpochs(), estimator.getSeed()) == (16, 3, 5)
    copied = estimator.copy({estimator.epochs: 7})
    assert (copied.getEpochs(), estimator.getEpochs(), copied.uid) == (7, 3, estimator.uid)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'; did you mean 'batchSize'"):
        TorchEstimator(batchsize=3)
    with pytest.raises(TypeError):
        TorchEstimator(torch.nn.Linear(1, 1))


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


def test_two_columns_of_one_name_are_refused_by_it_where_they_are_used_and_nowhere_else() -> None:
    twice = StructType([*SCHEMA.fields, StructField("y", DoubleType()), StructField("text", StringType())])
    with pytest.raises(ValueError, match="labelCols: 2 columns of the DataFrame are named 'y', as after a join"):
        make()._layout(twice)
    with pytest.raises(ValueError, match="stratifyCol: 2 columns of the DataFrame are named 'y'"):
        plan_split(make(stratifyCol="y", validationFraction=0.1), None, twice)
    assert make(labelCols=["n"])._layout(twice).columns == ["x", "n"]


@pytest.mark.parametrize("kind", [LongType(), StringType(), ArrayType(LongType()), VectorUDT()])
def test_classes_of_a_stratified_split_may_be_whatever_spark_can_sort(kind: DataType) -> None:
    schema = StructType([StructField("c", kind)])
    assert plan_split(make(stratifyCol="c", validationFraction=0.1), None, schema).stratify == "c"


class Variant(DataType):
    """Spark 4's VariantType, as far as the plan looks."""

    @classmethod
    def typeName(cls) -> str:  # noqa: N802
        return "variant"


MAP = MapType(StringType(), LongType())


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


def test_gpus_that_spark_does_not_assign_are_an_error_on_the_driver() -> None:
    for conf in ({}, {"spark.task.resource.gpu.amount": "0"}):
        with pytest.raises(ValueError, match=r"useGpu=True, but .* 0 GPUs: set spark.task.resource.gpu.amount=1"):
            check_gpus(conf, wanted=True)
        check_gpus(conf)
    check_gpus({"spark.task.resource.gpu.amount": "0.5"}, wanted=True)


class Positional(torch.nn.Module):
    """Takes two arguments and codes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return self.weights(torch.stack([x, y], 1)) * codes


@pytest.mark.parametrize("kind", [TorchClassifier, TorchRegressor])
def test_classifier_and_regressor_take_several_columns_as_the_estimator_does(kind: Any) -> None:
    columns = {"featureCols": ["x", "list"], "labelCol": "y", "categoricalCols": ["n"]}
    layout = kind(model=Positional(), **columns)._layout(SCHEMA)
    assert [entry.columns for entry in layout.inputs] == [("x",), ("list",), ("n",)]
    with pytest.raises(ValueError, match=r"give one of featuresCol and featureCols, not both: 'x', \['x', 'list'\]"):
        kind(featuresCol="x", **columns)._layout(SCHEMA)
    with pytest.raises(ValueError, match="featureCols: there is no column 'z'"):
        kind(featureCols=["x", "z"], labelCol="y")._layout(SCHEMA)


def test_columns_are_put_side_by_side_for_a_network_that_takes_one_argument() -> None:
    together = recipe(make(model=torch.nn.Linear(3, 1), featureCols=["x", "y", "code"], labelCols=["x"])).layout
    assert [entry.columns for entry in together.inputs] == [("x", "y", "code")]
    batch = {"x": torch.ones(2), "y": torch.zeros(2), "code": torch.full((2,), 2.0)}
    assert together.arguments(batch)[0][0].tolist() == [[1.0, 0.0, 2.0], [1.0, 0.0, 2.0]]
    apart = recipe(make(model=torch.nn.Bilinear(1, 1, 1), featureCols=["x", "y"], labelCols=["x"])).layout
    assert [entry.columns for entry in apart.inputs] == [("x",), ("y",)]
    with pytest.raises(ValueError, match=r"mat1 and mat2 .* side by side in one argument \[rows, 2\]"):
        recipe(make(model=torch.nn.Linear(5, 1), featureCols=["x", "y"], labelCols=["x"]))


def test_a_model_without_anything_to_train_is_an_error_that_says_so() -> None:
    with pytest.raises(
        ValueError, match="the model has nothing to train: it has no parameter whose requires_grad is True"
    ):
        recipe(make(model=torch.nn.Linear(1, 1).requires_grad_(False)))


def test_the_name_of_the_stores_own_column_is_refused() -> None:
    check_names(["x", "split"])
    with pytest.raises(
        ValueError, match=r"column '_split' cannot be trained on, .* df.withColumnRenamed\('_split', …\)"
    ):
        check_names(["x", "_split"])
    for name in ("__spark_elastic_key", "__Spark_Elastic_Stratum"):
        with pytest.raises(ValueError, match=f"column '{name}' cannot be trained on"):
            check_names([name])


def test_only_a_data_frame_is_fitted() -> None:
    with pytest.raises(TypeError, match="fit takes a Spark DataFrame, not <class 'int'>"):
        make().fit(3)


def classifier_model(outputs: int, **params: Any) -> Any:
    classifier = TorchClassifier(model=torch.nn.Linear(1, outputs), featuresCol="x", labelCol="y", **params)
    return classifier._untrained(recipe(classifier), {"x": torch.zeros(3, 1), "y": torch.zeros(3)})


@pytest.mark.parametrize("kind", [TorchModel, TorchClassificationModel, TorchRegressionModel])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.nn.Linear, r"model= must be an instance of torch.nn.Module, not the class Linear: write Linear\(…\)"),
        ("net.pt", r"model= must be a torch.nn.Module, not 'net.pt'"),
    ],
)
def test_a_model_takes_a_network_and_no_class_of_networks(kind: Any, given: object, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        kind(model=given)


def test_a_model_explains_its_size_and_shapes() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2)).requires_grad_(False)
    network[0].requires_grad_(True)
    model = classifier_model(2).describe(model=network, history=[{"loss": 0.5}, {"loss": 0.25}])
    assert model.explain().splitlines() == [
        "Sequential: 8 parameters, 4 of them trainable; 56 bytes with its buffers",
        "inputs: x [rows, 1]; outputs: [rows, 2]",
        "trained for 2 epochs, loss 0.25",
    ]
    assert TorchModel(network, featureCols=["x"]).explain() == model.explain().splitlines()[0]
    assert TorchModel().explain() == "TorchModel without a network"


def test_sparks_own_classes_are_those_of_the_estimators_and_models() -> None:
    classifier = classifier_model(2)
    assert isinstance(TorchClassifier(), ProbabilisticClassifier)
    assert isinstance(classifier, ProbabilisticClassificationModel)
    assert isinstance(TorchRegressor(), Regressor)
    assert isinstance(TorchRegressionModel(), RegressionModel)
    assert (classifier.numFeatures, TorchRegressionModel().numFeatures) == (1, -1)
    assert not classifier.hasSummary
    with pytest.raises(RuntimeError, match="there is no training summary: this TorchClassificationModel does not come"):
        _ = classifier.summary


def test_the_number_of_classes_may_be_given() -> None:
    model = classifier_model(2, numClasses=2)
    model._check({})
    assert model.numClasses == 2
    assert classifier_model(1).numClasses == 2
    with pytest.raises(ValueError, match="numClasses=3, but the model has 2 outputs"):
        classifier_model(2, numClasses=3)._check({})


def test_thresholds_are_one_for_each_class_and_at_most_one_is_0() -> None:
    for wrong in ([-0.1, 1.0], [0.0, 0.0], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="thresholds: must be numbers from 0 on with at most one 0, not"):
            TorchClassifier(thresholds=wrong)
    model = classifier_model(2, thresholds=[0.0, 1.0])
    model._check({})
    for change in (model.setThresholds, lambda wrong: model.copy({model.thresholds: wrong})):
        with pytest.raises(ValueError, match=r"one number for each of 2 classes, not \[0.1\]"):
            change([0.1])
        with pytest.raises(ValueError, match="at most one 0"):
            change([0, 0])
    assert model.getThresholds() == [0.0, 1.0]
    with pytest.raises(ValueError, match="one number for each of 2 classes"):
        classifier_model(2, thresholds=[0.1])._check({})


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


def test_an_attribute_in_place_of_a_setter_is_an_error() -> None:
    estimator = make()
    with pytest.raises(AttributeError, match=r"epochs is a Param: write setEpochs\(5\)"):
        estimator.epochs = 5
    assert estimator.setEpochs(5).copy().getEpochs() == 5


def test_a_model_is_pickled_without_the_udf_of_its_session() -> None:
    model = TorchModel(torch.nn.Linear(1, 1))
    model._udf = ((), threading.Lock())  # as little of it can be pickled as of Spark's
    assert cloudpickle.loads(cloudpickle.dumps(model))._udf is None
    assert model._udf is not None


def test_both_batch_sizes_are_an_error() -> None:
    with pytest.raises(ValueError, match="batchSize=8 or globalBatchSize=16, not both"):
        recipe(make(batchSize=8, globalBatchSize=16))


def test_the_training_loader_is_balanced_and_no_other() -> None:
    data = plan_data(make(globalBatchSize=16, balance="auto"), ("train", None), {}, True)
    assert data.training["balance"] == "auto"
    assert "balance" not in data.reading
    assert plan_data(make(), ("train", None), {}, True).training["balance"] is None


def test_relative_paths_are_those_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = plan_data(make(), ("train", "s3://bucket/validation"), {}, True)
    assert (data.training_url, data.validation_url) == (f"file://{tmp_path}/train", "s3://bucket/validation")


def test_a_scalar_becomes_a_matrix_only_for_models_that_want_one() -> None:
    assert recipe(make()).layout.inputs[0].expand
    assert not recipe(make(model=torch.nn.Embedding(3, 1), featureCols=["n"])).layout.inputs[0].expand


def test_indexes_that_string_indexer_wrote_become_whole_numbers() -> None:
    assert is_index(SCHEMA["code"])
    assert is_index(SCHEMA["n"])
    assert not is_index(SCHEMA["x"])
    layout = make(featureCols=None, inputs={"c": ["code", "n"], "x": ["x"], "d": (["x"], "int64")})._layout(SCHEMA)
    assert [entry.dtype for entry in layout.inputs] == ["int64", None, "int64"]


def test_the_estimators_model_and_optimizer_are_copied_together() -> None:
    model = torch.nn.Linear(1, 1)
    planned = recipe(make(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    assert planned.network is not model
    parameters = planned.steps.optimizer.param_groups[0]["params"]
    assert parameters[0] is next(planned.network.parameters())


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


def test_lists_have_no_shape_that_the_schema_tells() -> None:
    layout = make(featureCols=["list"])._layout(SCHEMA)
    assert made_up_batch(layout, SCHEMA) is None
    check_columns(SCHEMA, ["list"], "featureCols")


# ---------------------------------------------------------------- the store and the record of runs


@pytest.mark.parametrize(
    ("url", "spark", "worker"),
    [
        ("/data/store", "file:///data/store", "file:///data/store"),
        ("file:/data/store", "file:///data/store", "file:///data/store"),
        ("s3a://bucket/x/", "s3a://bucket/x", "s3://bucket/x"),
        ("s3://bucket/x", "s3a://bucket/x", "s3://bucket/x"),
        ("hdfs://host:8020/x", "hdfs://host:8020/x", "hdfs://host:8020/x"),
        ("dbfs:/x/y", "dbfs:/x/y", "file:///dbfs/x/y"),
        ("gcs://bucket/x", "gs://bucket/x", "gs://bucket/x"),
        ("abfss://box@account.dfs.core.windows.net/x",) * 3,
    ],
)
def test_spark_and_workers_meet_in_the_store(url: str, spark: str, worker: str) -> None:
    store = Store.create(url)
    assert (store.spark_url(), store.worker_url()) == (spark, worker)
    assert pickle.loads(pickle.dumps(store)) == store


def test_a_store_may_be_given_by_its_path() -> None:
    assert TorchEstimator(store=Path("/data/store")).getStore() == Store.create("/data/store")  # type: ignore[arg-type]


def test_explained_params_tell_no_secrets() -> None:
    store = Store.create("s3://AK:hidden@bucket/x", storage_options={"secret": "hidden"})
    explained = make(store=store).explainParams()
    assert "s3://…@bucket/x" in explained
    assert "hidden" not in explained


def test_a_store_keeps_what_it_is_told() -> None:
    assert Store.create("/x").keep == {"data", "checkpoints", "logs"}
    assert Store.create("/x", keep=False).keep == set()
    assert Store.create("/x", keep="data").keep == {"data"}
    for wrong in ("all", 3):
        with pytest.raises(ValueError, match=f"keep must be True, False or some of .* not {wrong!r}"):
            Store.create("/x", keep=wrong)
    with pytest.raises(ValueError, match="not 'a/b'"):
        Store.create("/x").run_url("a/b")


def test_on_a_cluster_a_store_has_to_be_given() -> None:
    session = SimpleNamespace(conf={"spark.master": "spark://host:7077"})
    with pytest.raises(ValueError, match="needed on spark://host:7077: store="), make()._opened_store(session):
        pass


def test_a_run_is_told_apart_by_its_data_and_its_training_params_but_not_by_weights() -> None:
    one, same = describe_params(make()), describe_params(make(model=torch.nn.Linear(1, 1), epochs=9, verbose=0))
    assert one == same
    other = describe_params(make(batchSize=7, optimizer=torch.optim.SGD, optimizerParams={"lr": 1.0}))
    found = RunRecord("run", "data", one).differences(RunRecord("run", "other", other))
    assert found[0] == "the data"
    assert {entry.split(" ")[0] for entry in found[1:]} == {"batchSize", "optimizer", "optimizerParams"}
    assert describe(lambda x: x) == describe(lambda x: x)
    assert describe(lambda x: x + 2) != describe(lambda x: x + 1)


def test_the_records_of_all_releases_are_read_and_one_of_another_version_is_another_run() -> None:
    present = RunRecord("run", "data", version=VERSION)
    assert read_record(json.dumps(asdict(present)).encode(), "run.json") == present
    first = read_record(b'{"run_id": "run", "data": "data", "params": {}, "data_url": null}', "run.json")
    assert first.differences(present) == ["its record (of version 1, this release writes 2)"]
    later = read_record(b'{"run_id": "run", "data": "data", "version": 3, "seed": 1}', "run.json")
    assert later.differences(present) == ["its record (of version 3, this release writes 2)"]


@pytest.mark.parametrize("content", [b"", b'{"run_id": "ru', b"[]", b'{"run_id": "run"}', b"\xff"])
def test_what_is_no_record_of_a_run_is_told_with_its_place(content: bytes) -> None:
    with pytest.raises(DamagedError, match=r"runs/run/run\.json is damaged"):
        read_record(content, "/store/runs/run/run.json")


# ---------------------------------------------------------------- concurrent fits


def test_a_lonely_fit_gets_all_that_it_asks_for() -> None:
    with SlotLedger().slots(1, 8, 4) as granted:
        assert granted == 8


def test_fits_share_slots_where_these_suffice_and_wait_in_line_where_not() -> None:
    ledger, order = SlotLedger(), []
    done = threading.Event()

    def fit(name: str, least: int) -> None:
        with ledger.slots(least, 4, 4) as granted:
            order.append((name, granted))

    with ledger.slots(2, 2, 4):
        with ledger.slots(1, 4, 4) as granted:
            assert granted == 2
            big = threading.Thread(target=fit, args=("big", 3))
            big.start()
            ledger._changed.acquire()
            while len(ledger._line) < 1:
                ledger._changed.wait(5)
            ledger._changed.release()
            small = threading.Thread(target=lambda: (fit("small", 1), done.set()))
            small.start()
        assert not order, "the first in line waits for three, and nobody passes it"
    big.join(60)
    small.join(60)
    assert [name for name, _ in order] == ["big", "small"]
    assert done.is_set()


# ---------------------------------------------------------------- models


def test_a_model_carries_its_estimators_uid_and_training_params() -> None:
    estimator = make(learningRate=0.5, optimizer=torch.optim.SGD, useGpu=False, store="/x", epochs=3)
    model = estimator._untrained(recipe(estimator), {"x": torch.zeros(3), "y": torch.zeros(3)})
    assert model.uid == estimator.uid
    assert all(entry.parent == estimator.uid for entry in model.params)
    assert (model.getLearningRate(), model.getEpochs(), model.getTransformBatchSize()) == (0.5, 3, 1024)
    assert model.getOptimizer() is torch.optim.SGD
    assert model.getLabelCols() == ["y"]
    assert model.getUseGpu() is None
    assert not model.hasParam("store")
    assert "learningRate: lr of the optimizer" in model.explainParams()
    written = ModelWriter(model)._params()
    assert {"learningRate", "featureCols", "epochs"} <= written[0].keys()
    assert written[1] == {}


def test_a_model_can_be_told_to_score_other_columns() -> None:
    estimator = make(featureCols=["x", "code"], model=torch.nn.Bilinear(1, 1, 1))
    batch = {name: torch.zeros(3) for name in ("x", "code", "y")}
    model = estimator._untrained(recipe(estimator), batch)
    other = model.copy({model.featureCols: ["n", "z"]})
    assert other.layout.features == ["n", "z"]
    assert other.shapes == {"n": (), "z": ()}
    assert model.layout.features == ["x", "code"]
    with pytest.raises(ValueError, match=r"takes 2 columns, \['x', 'code'\], and cannot take \['x'\]"):
        model.setFeatureCols("x")
    classifier = classifier_model(2)
    classifier.setFeaturesCol("other")
    assert classifier.layout.features == ["other"]


def test_a_driver_in_the_cluster_leaves_the_workers_two_slots_less() -> None:
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=4, master="yarn"), conf={})
    sizes = [plan_sizes(make(driver=driver), session) for driver in ("client", "cluster")]
    assert [(each.start, each.most) for each in sizes] == [(4, 4), (2, 2)]
    assert plan_sizes(make(driver="cluster", maxNp=4), session).most == 4
    with pytest.raises(ValueError, match=r"this cluster has 4 in all: too few for 3 workers.*give maxNp"):
        plan_sizes(make(driver="cluster", minNp=3), session)
