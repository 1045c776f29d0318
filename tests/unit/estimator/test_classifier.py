"""What a classifier makes of a network's outputs."""

from __future__ import annotations

import numpy as np
import pytest
from unstarted_fits import classifier_model

from spark_elastic.estimator import TorchClassifier
from spark_elastic.estimator.classifier import Classes


def test_thresholds_follow_sparks_rule() -> None:
    logits = np.array([[2.0, 1.0, 0.0], [0.0, 0.1, 0.2]])
    roles = {"raw": "rawPrediction", "p": "probability", "prediction": "prediction"}
    plain = Classes(roles, None, False)([logits])
    assert plain["prediction"].tolist() == [0.0, 2.0]
    assert plain["p"].sum(1).tolist() == pytest.approx([1.0, 1.0])
    assert Classes(roles, [0.9, 0.9, 0.01], False)([logits])["prediction"].tolist() == [2.0, 2.0]
    assert Classes(roles, [0.0, 0.5, 0.5], False)([logits])["prediction"].tolist() == [0.0, 0.0]
    single = Classes(roles, None, False)([np.array([[1.0], [-1.0]])])
    assert single["p"][:, 1].tolist() == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))])
    assert Classes(roles, None, True)([np.array([0.2, 0.8])])["prediction"].tolist() == [0.0, 1.0]


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
