"""On which GPU a Spark task scores."""

from __future__ import annotations

import os

import pytest
import torch

from spark_elastic.errors import SparkElasticError
from spark_elastic.estimator.transform import place_of


def test_a_number_counts_within_what_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [place_of(address) for address in ("0", "1", "5")] == [0, 1, 0]


def test_the_id_of_a_slice_becomes_all_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert place_of("MIG-b") == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert place_of("MIG-b") == 0
    with pytest.raises(SparkElasticError, match=r"another GPU than MIG-a.*set spark.python.worker.reuse=false"):
        place_of("MIG-a")
