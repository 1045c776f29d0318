"""The layout of an optimizer's state is that of its parameter, whatever it was kept in."""

from __future__ import annotations

import torch

from spark_elastic.worker.optimizers.memory_layout import laid_out


def test_tensors_of_the_parameters_shape_get_its_layout_and_others_stay() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    average, steps = torch.randn(2, 3, 4, 4), torch.tensor(3.0)
    found = laid_out({"average": average, "step": steps, "name": "adam"}, parameter)
    assert isinstance(found["average"], torch.Tensor)
    assert found["average"].stride() == parameter.stride()
    assert torch.equal(found["average"], average)
    assert not found["average"].requires_grad
    assert found["step"] is steps
    assert found["name"] == "adam"
    again = laid_out(found, parameter)
    assert again["average"] is found["average"]
