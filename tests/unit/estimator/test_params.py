"""Params: names, what they share with Spark's own, and models that have them; none of this needs a JVM."""

from __future__ import annotations

import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pyspark.ml.classification import ProbabilisticClassificationModel, ProbabilisticClassifier
from pyspark.ml.regression import RegressionModel, Regressor
from unstarted_fits import SCHEMA, classifier_model, make

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
from spark_elastic.launchers.session import check_gpus
from spark_elastic.loggers import TensorBoardLogger

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


@pytest.mark.parametrize("odd", [float("inf"), float("nan"), "3", True, 2.5])
def test_what_is_no_whole_number_is_refused_by_the_name_of_the_param(odd: object) -> None:
    with pytest.raises(TypeError, match="epochs: must be a whole number, not"):
        TorchEstimator(epochs=odd)


def test_none_clears_a_param_however_it_is_set() -> None:
    estimator = TorchEstimator(epochs=3, learningRate=0.5)
    estimator.setEpochs(None)
    estimator.set(estimator.learningRate, None)
    assert (estimator.getEpochs(), estimator.getLearningRate()) == (1, None)
    assert TorchEstimator(epochs=3).copy({TorchEstimator.epochs: None}).getEpochs() == 3, "another class's Param"
    other = TorchEstimator(epochs=3)
    assert other.copy({other.epochs: None}).getEpochs() == 1


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


def test_only_a_data_frame_is_fitted() -> None:
    with pytest.raises(TypeError, match="fit takes a Spark DataFrame, not <class 'int'>"):
        make().fit(3)


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


def test_an_attribute_in_place_of_a_setter_is_an_error() -> None:
    estimator = make()
    with pytest.raises(AttributeError, match=r"epochs is a Param: write setEpochs\(5\)"):
        estimator.epochs = 5
    assert estimator.setEpochs(5).copy().getEpochs() == 5


def test_explained_params_tell_no_secrets() -> None:
    store = Store.create("s3://AK:hidden@bucket/x", storage_options={"secret": "hidden"})
    explained = make(store=store).explainParams()
    assert "s3://…@bucket/x" in explained
    assert "hidden" not in explained


def test_on_a_cluster_a_store_has_to_be_given() -> None:
    session = SimpleNamespace(conf={"spark.master": "spark://host:7077"})
    with pytest.raises(ValueError, match="needed on spark://host:7077: store="), make()._opened_store(session):
        pass
