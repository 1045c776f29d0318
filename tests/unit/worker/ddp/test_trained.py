"""Which parameters are trained: ranks compare it, and what changes between steps is reduced all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forked_world import on_ranks, world
from torch import nn

from spark_elastic import DistributedDataParallel, RanksDifferError


def differ_in_what_trains(folder: Path, rank: int, frozen: tuple[str, ...], is_corrected: bool) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    if rank == 1:
        for name in frozen:
            model.module.get_parameter(name).requires_grad_(False)
    with world(folder, rank, 2, [model]):
        if is_corrected:
            model.module.requires_grad_(True)
        model(torch.zeros(4, 8))


ALL = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")


@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("frozen", [("2.bias",), ALL])
def test_ranks_that_differ_in_what_requires_gradients_are_told_a_name_ahead_of_any_other_collective(
    frozen: tuple[str, ...], is_corrected: bool
) -> None:
    """Torch's wrapper sends buffers ahead of a forward, which a rank without one would not take part in."""
    first = frozen[0].replace(".", r"\.")
    with pytest.raises(RanksDifferError, match=rf"Sequential\.{first} requires a gradient on ranks \[0\] only, of 2"):
        on_ranks(2, differ_in_what_trains, frozen, is_corrected)


def change_what_trains(folder: Path, rank: int) -> list[str]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    one, other = model.module[0], model.module[1]
    one.requires_grad_(False)
    told: list[str] = []
    with world(folder, rank, 2, [model]) as formed:
        formed.compares = told.append
        for change in (
            lambda: None,
            lambda: one.bias.requires_grad_(True),
            lambda: other.bias.requires_grad_(False),
            lambda: setattr(one, "bias", nn.Parameter(torch.ones(8))),
            lambda: setattr(one, "bias", None),
            lambda: model.module.requires_grad_(False),  # nothing is reduced then, and nothing compared
        ):
            change()
            model(torch.ones(4, 8))
    return told


def test_the_driver_is_told_what_has_changed_ahead_of_the_collective_that_compares_it() -> None:
    told = [
        "Sequential.0.bias began to require a gradient, or was replaced,",
        "Sequential.1.bias ceased to require a gradient",
        "Sequential.0.bias began to require a gradient, or was replaced,",
        "parameters of Sequential were removed",
    ]
    assert on_ranks(2, change_what_trains) == [told] * 2


def become_double(folder: Path, rank: int) -> tuple[list[str], list[float]]:
    model = DistributedDataParallel(nn.Linear(2, 1))
    told: list[str] = []
    with world(folder, rank, 2, [model]) as formed:
        formed.compares = told.append
        model(torch.ones(1, 2)).sum().backward()
        model.double()
        model.zero_grad()
        model(torch.full((1, 2), float(rank), dtype=torch.float64)).sum().backward()
        return told, model.module.weight.grad.flatten().tolist()


def test_parameters_that_stay_the_same_objects_and_get_another_dtype_are_reduced() -> None:
    assert on_ranks(2, become_double) == [(["Linear.weight became torch.float64"], [0.5, 0.5])] * 2


class OnDevice(nn.Parameter):
    """Says which device it is on, as there is only one; tests/gpu/test_jobs.py moves to a GPU."""

    device = torch.device("cpu")


def move_on_one_rank(folder: Path, rank: int) -> tuple[bool, list[str], list[float]]:
    net = nn.Linear(2, 1, bias=False)
    net.weight = weight = OnDevice(torch.ones(1, 2))
    model = DistributedDataParallel(net)
    told: list[str] = []
    with world(folder, rank, 2, [model]) as formed:
        formed.compares = told.append
        before = model._here.ddp
        if rank == 1:
            weight.device = torch.device("cpu", 0)  # which is another name
        for _ in range(3):
            model(torch.full((1, 2), float(rank))).sum().backward()
        return model._here.ddp is before, told, weight.grad.flatten().tolist()


def test_a_model_that_moves_to_another_device_on_one_rank_is_reduced_there_and_needs_no_collective() -> None:
    """Found on a GPU: torch's wrapper went on to reduce memory of the device before, and ranks trained apart."""
    assert on_ranks(2, move_on_one_rank) == [(True, [], [1.5, 1.5]), (False, [], [1.5, 1.5])]
