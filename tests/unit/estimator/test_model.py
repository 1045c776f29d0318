"""Models of fits: what they take, tell and score, and that they travel."""

from __future__ import annotations

import threading
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from unstarted_fits import classifier_model, make, recipe

from spark_elastic.estimator import TorchClassificationModel, TorchModel, TorchRegressionModel
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.persistence import ModelWriter


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


def test_a_model_is_pickled_without_the_udf_of_its_session() -> None:
    model = TorchModel(torch.nn.Linear(1, 1))
    model._udf = ((), threading.Lock())  # as little of it can be pickled as of Spark's
    assert cloudpickle.loads(cloudpickle.dumps(model))._udf is None
    assert model._udf is not None


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


@pytest.mark.parametrize("trained", [{"featuresCol": "f"}, {"featureCols": ["f"]}])
def test_the_features_that_were_named_last_count_in_copies_too(trained: dict[str, Any]) -> None:
    layout = Layout((Input(None, ("f",)),), ("y",))
    model = TorchRegressionModel(nn.Linear(2, 1), **trained).describe(layout=layout, shapes={"f": (2,)}, widths=[0])
    several, one, by_param = model.copy(), model.copy(), model.copy()
    several.setFeatureCols(["g"])
    one.setFeaturesCol("g")
    by_param.set(by_param.featureCols, ["g"])
    for told in (several, one, by_param):
        assert told.layout.features == told.copy().layout.features == ["g"]
    as_param = model.copy({model.featureCols: ["g"]})
    assert as_param.layout.features == ["g"]
    assert as_param.copy({as_param.predictionCol: "p"}).layout.features == ["g"]
    assert model.copy({model.featuresCol: "h"}).copy().layout.features == ["h"]
    assert model.layout.features == ["f"]
