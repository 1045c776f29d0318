"""What is saved of estimators and models, and what is restored of it, without Spark's own readers and writers."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from unstarted_fits import make, recipe

from spark_elastic.estimator import TorchModel
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.persistence import ModelReader, ModelWriter, _class_name, split_params


def test_params_that_json_gives_back_as_they_are_can_be_read_and_all_others_are_objects() -> None:
    estimator = make(epochs=3, learningRate=0.5, validationFraction=math.nextafter(0.25, 1), classWeights=None)
    plain, other = split_params(estimator)
    assert plain.items() >= {"epochs": 3, "learningRate": 0.5, "validationFraction": math.nextafter(0.25, 1)}.items()
    assert {"model", "loss"} <= other.keys()
    assert not plain.keys() & other.keys()
    assert plain.keys() | other.keys() == {param.name for param in estimator.params if estimator.isSet(param)}


def test_keys_that_json_would_make_strings_of_are_kept_as_objects() -> None:
    estimator = make(optimizerParams={"betas": [0.5, 0.9]}, metrics={"size": len})
    estimator._set(modelParams={1: 2})
    plain, other = split_params(estimator)
    assert plain["optimizerParams"] == {"betas": [0.5, 0.9]}
    assert other["modelParams"] == {1: 2}


def test_the_facts_of_a_model_come_back_from_json_as_they_were() -> None:
    inputs = (Input(None, ("x",), "float32", expand=True), Input("codes", ("a", "b"), "int64"))
    layout = Layout(inputs, ("y",), "w", ("score",))
    network = torch.nn.Linear(1, 1)
    model = TorchModel(network).describe(
        layout=layout, shapes={"x": (), "a": (3,), "b": None}, widths=[0, 2], history=[{"loss": 0.5}], run_id="run"
    )
    again = TorchModel()
    facts: dict[str, Any] = json.loads(json.dumps(ModelWriter(model)._facts()))
    ModelReader(TorchModel)._restore(again, facts, ModelWriter(model)._objects())
    assert again.model is network
    for name in ("layout", "shapes", "widths", "history", "run_id", "label_metadata", "is_probability"):
        assert getattr(again, name) == getattr(model, name), name


def test_a_model_is_saved_without_the_functions_of_its_training() -> None:
    estimator = make(optimizer=torch.optim.SGD, epochs=3)
    model = estimator._untrained(recipe(estimator), {"x": torch.zeros(3), "y": torch.zeros(3)})
    plain, other = ModelWriter(model)._params()
    assert plain["epochs"] == 3
    assert other == {}
    assert split_params(model)[1].keys() >= {"optimizer"}, "which the model itself has"


def test_a_class_of_an_earlier_release_is_found_where_it_is_now() -> None:
    assert _class_name("spark_elastic.estimator.model.TorchModel") == "spark_elastic.estimator.TorchModel"
    assert _class_name("spark_elastic.estimator.TorchModel") == "spark_elastic.estimator.TorchModel"
    assert _class_name("elsewhere.Other") == "elsewhere.Other"
