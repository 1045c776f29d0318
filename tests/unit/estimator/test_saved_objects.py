"""Objects with tensors, saved in two parts: tensors by name, and the rest as code."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from spark_elastic.estimator.saved_objects import Pickler, Unpickler, names_of_tensors, write_objects


def test_tensors_are_saved_by_name_and_tied_ones_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.extra = torch.ones(1)
    objects = {"params": {"loss": nn.CrossEntropyLoss(torch.ones(2))}, "model": model}
    tensors: dict[str, torch.Tensor] = {}
    code = io.BytesIO()
    Pickler(code, tensors, names_of_tensors(objects)).dump(objects)
    assert set(tensors) >= set(model.state_dict()) - {"2.weight"}
    loaded = Unpickler(io.BytesIO(code.getvalue()), tensors).load()
    copy = loaded["model"]
    assert copy[2].weight is copy[0].weight
    assert not copy[0].bias.requires_grad
    assert all(torch.equal(value, copy.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(loaded["params"]["loss"].weight, torch.ones(2))


def test_what_parameters_have_besides_their_numbers_is_named_when_it_is_not_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.rate = 0.0
    model[1].bias.register_hook(lambda gradient: gradient * 0)
    with pytest.warns(UserWarning, match=r"of the parameters 0\.weight, 1\.bias only the numbers are saved"):
        write_objects(str(tmp_path), {"model": model})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_objects(str(tmp_path), {"model": nn.Linear(2, 2)})
