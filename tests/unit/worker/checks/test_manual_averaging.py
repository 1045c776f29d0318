"""Whether user code may have averaged gradients by hand."""

from __future__ import annotations

import torch

from spark_elastic.worker.checks.manual_averaging import Reductions


def test_as_many_numbers_have_to_be_reduced_as_parameters_have_since_the_generation_began() -> None:
    reductions, parameters = Reductions(), [torch.zeros(2, 3), torch.zeros(4)]
    assert not reductions.may_average(parameters)
    reductions.note(6)
    assert not reductions.may_average(parameters)
    reductions.note(4)
    assert reductions.may_average(parameters)
    reductions.begin()
    assert not reductions.may_average(parameters)
