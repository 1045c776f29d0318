"""What a classifier makes of a network's outputs."""

from __future__ import annotations

import numpy as np
import pytest

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
