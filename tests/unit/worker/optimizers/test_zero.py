"""ZeroRedundancyOptimizer between real processes: the bits of the plain optimizer, each rank with its parts of the state only."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_world import on_ranks, world
from torch import nn

from spark_elastic import (
    DistributedDataParallel,
    RanksDifferError,
    SparkElasticError,
    TorchState,
    TrainingCodeError,
    ZeroRedundancyOptimizer,
)
from spark_elastic.protocol.messages import Member
from spark_elastic.worker.optimizers.zero import Division, check_saved_once, deal
from spark_elastic.worker.state.keepers.sharded import division_of

STEPS = 4
MAKERS: dict[str, functools.partial[torch.optim.Optimizer]] = {
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "fused AdamW": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "foreach SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adagrad, which has state from the start": functools.partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop with a tensor for a rate": functools.partial(torch.optim.RMSprop, lr=torch.tensor(0.01), centered=True),
}


def members(size: int) -> list[Member]:
    return [Member(rank, rank, rank, size, 0, 1, None) for rank in range(size)]


def divided(rank: int, size: int, redundancy: int = 1) -> Division:
    division = division_of(members(size), rank, redundancy)
    assert division is not None
    return division


def net() -> nn.Module:
    torch.manual_seed(0)
    # One tensor is large enough to be sent by itself, and one is not contiguous.
    model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 70), nn.Linear(70, 3, bias=False))
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices, vectors = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[torch.Tensor]:
    """Take some steps, with a schedule and clipped gradients, all but the first by a closure; return the weights."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for number in range(STEPS):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))

        def closure(rows: torch.Tensor = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss  # type: ignore[no-any-return]

        if number:
            assert optimizer.step(closure) is not None
        else:
            closure()
            optimizer.step()
        scheduler.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: Any, other: Any) -> bool:
    """Whether two state dicts are equal to the bit, also in the order of their entries."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def all_beside_plain(folder: Path, rank: int, size: int, redundancy: int) -> list[str]:
    return [wrong for name in MAKERS for wrong in beside_plain(folder / name, rank, size, redundancy, name)]


def beside_plain(folder: Path, rank: int, size: int, redundancy: int, name: str) -> list[str]:
    """Train with the plain optimizer and with the divided one; tell what differs."""
    folder.mkdir(exist_ok=True)
    make = copy.deepcopy(MAKERS[name])
    plain, ours = DistributedDataParallel(net()), DistributedDataParallel(net())
    plainly = make(groups(plain))
    optimizer = ZeroRedundancyOptimizer(groups(ours), make.func, **MAKERS[name].keywords)
    wrong = []
    with world(folder, rank, size, [plain, ours]):
        optimizer.divide(divided(rank, size, redundancy))
        if not all(map(torch.equal, train(plain, plainly, rank), train(ours, optimizer, rank))):
            wrong.append("weights")
        parts = deal(optimizer.sizes, size)
        mine = [number for number, part in enumerate(parts) if part in divided(rank, size, redundancy).held[rank]]
        if sorted(optimizer.held_state()) != mine or len(mine) == len(parts):
            wrong.append(f"keeps {sorted(optimizer.held_state())}, not {mine}")
        if not same(optimizer.state_dict(), plainly.state_dict()):
            wrong.append("state dict")
        # Each goes on from the other's.
        saved = plainly.state_dict()
        plainly.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        if not all(map(torch.equal, train(plain, plainly, rank), train(ours, optimizer, rank))):
            wrong.append("weights after loading")
        if sorted(optimizer.held_state()) != mine:
            wrong.append("what is kept after loading")
    return [f"{name}: {what}" for what in wrong]


@pytest.mark.parametrize(("size", "redundancy"), [(3, 1), (4, 2), (2, 0)])
def test_weights_and_state_have_the_bits_of_the_plain_optimizer(size: int, redundancy: int) -> None:
    assert on_ranks(size, all_beside_plain, size, redundancy) == [[]] * size


def freeze_and_scale(folder: Path, rank: int) -> bool:
    """Train with a frozen layer, one parameter for three ranks, and a GradScaler that once finds an infinite gradient."""
    weights = []
    model, plain = DistributedDataParallel(nn.Linear(2, 2)), DistributedDataParallel(nn.Linear(2, 2))
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each.module.bias.requires_grad_(False)
    with world(folder, rank, 3, [model, plain]):
        for each in (model, plain):
            nn.init.ones_(each.module.weight)
            optimizer: torch.optim.Optimizer = torch.optim.Adam(each.parameters())
            if each is model:
                optimizer = ZeroRedundancyOptimizer(each.parameters(), torch.optim.Adam)
                optimizer.divide(divided(rank, 3))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for number in range(STEPS):
                optimizer.zero_grad()
                scaler.scale(each(torch.full((1, 2), float("inf") if number == 1 else 0.1)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            weights.append(each.module.weight.detach())
    return torch.equal(*weights) and not torch.equal(weights[0], torch.ones(2, 2))


def test_a_scaler_skips_a_step_and_frozen_parameters_and_ranks_without_any_are_fine() -> None:
    assert on_ranks(3, freeze_and_scale) == [True] * 3


def test_parameters_are_dealt_out_evenly_and_always_alike() -> None:
    assert deal([5, 1, 4, 3, 3], 2) == [0, 1, 1, 1, 0]
    assert deal([7], 3) == [0]
    sizes = [(number * 37) % 101 + 1 for number in range(200)]
    loads = [sum(size for size, part in zip(sizes, deal(sizes, 8), strict=True) if part == p) for p in range(8)]
    assert max(loads) - min(loads) <= max(sizes)


def test_outside_a_job_it_is_the_plain_optimizer() -> None:
    weights = []
    for make in (torch.optim.Adam, functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam)):
        model = net()
        optimizer = make(model.parameters(), lr=0.05)
        weights.append(train(model, optimizer, 0))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 1.0})
        optimizer.param_groups[-1]["params"][0].grad = torch.ones(3)
        optimizer.step()
        weights[-1].append(optimizer.param_groups[-1]["params"][0].detach())
    assert all(map(torch.equal, *weights))


def test_after_a_restore_without_a_group_that_was_added_it_steps_on() -> None:
    model = net()
    state = TorchState(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam))
    train(model, state.optimizer, 0)
    state.commit()
    added = nn.Parameter(torch.ones(3))
    added.grad = torch.ones(3)
    for _ in range(2):
        state.optimizer.add_param_group({"params": [added]})
        state.optimizer.step()
        state.restore()
        train(model, state.optimizer, 0)


class Drifting(torch.optim.SGD):
    """Adapts its rate to all gradients together, as D-Adaptation does."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] *= 0.5
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


class Coupled(torch.optim.SGD):
    """Clips by the norm of all the gradients that it sees."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
        return super().step(closure)


def step_coupled(folder: Path, rank: int, size: int, redundancy: int) -> str:
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Coupled, lr=0.1)
    with world(folder, rank, size, [model]):
        optimizer.divide(divided(rank, size, redundancy))
        model(torch.ones(4, 8)).square().mean().backward()
        try:
            optimizer.step()
        except RanksDifferError as error:
            return str(error)
    return ""


def test_an_optimizer_that_couples_parameters_is_noticed_where_two_ranks_update_the_same_ones() -> None:
    told = on_ranks(3, step_coupled, 3, 1)
    assert all("updated the same parameters with Coupled and got different weights" in each for each in told)


class Dropping(torch.optim.SGD):
    """Drops the gradients that it has used."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.zero_grad()


class Zeroing(torch.optim.SGD):
    """Sets the gradients that it has used to 0."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.zero_grad(set_to_none=False)


def step_clearing(folder: Path, rank: int, kind: Any) -> str:
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1)
    with world(folder, rank, 3, [model]):
        for division in (None, divided(rank, 3)):
            optimizer.divide(division)
            model(torch.ones(4, 8)).square().mean().backward()
            try:
                optimizer.step()
            except SparkElasticError as error:
                return "" if division is None else str(error)
    return ""


@pytest.mark.parametrize("kind", [Dropping, Zeroing])
def test_an_optimizer_that_clears_gradients_is_refused_where_it_would_clear_only_some(kind: Any) -> None:
    told = on_ranks(3, step_clearing, kind)
    assert [each.partition(",")[0] for each in told] == [f"{kind.__name__} clears gradients in its step"] * 3


def step_without_averaging(folder: Path, rank: int, size: int) -> list[int]:
    """Return the numbers of the steps at which a difference was noticed."""
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    noticed = []
    with world(folder, rank, size, [model]):
        optimizer.divide(divided(rank, size))
        for number in range(1, 12):
            optimizer.zero_grad()
            with model.no_sync() if number % 3 == 0 else nullcontext():
                model(torch.full((4, 8), 1.0 + rank)).square().mean().backward()
            try:
                optimizer.step()
            except RanksDifferError:
                noticed.append(number)
    return noticed


def test_gradients_that_are_not_averaged_are_noticed_at_any_step() -> None:
    assert on_ranks(3, step_without_averaging, 3) == [[3, 6, 9]] * 3


def test_what_cannot_be_divided_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(TypeError, match="a class of optimizers, or a function that makes one, not Adam"):
        ZeroRedundancyOptimizer(parameters, torch.optim.Adam(parameters))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="and made a list"):
        ZeroRedundancyOptimizer(parameters, list)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS does not update each parameter by itself"):
        ZeroRedundancyOptimizer(parameters, torch.optim.LBFGS)
    drifting = ZeroRedundancyOptimizer(parameters, Drifting, lr=0.1)
    with pytest.raises(SparkElasticError, match="Drifting changes its setting lr in a step"):
        drifting.step()
    counting = ZeroRedundancyOptimizer(parameters, Counting, lr=0.1)
    with pytest.raises(SparkElasticError, match="Counting keeps state of its own under 'steps'"):
        counting.step()
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam)
    optimizer.divide(divided(0, 3))
    with pytest.raises(SparkElasticError, match="cannot be added while"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


class Saving(torch.optim.SGD):
    """Has a number in its state dict that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": 0}


class Quantized(torch.optim.SGD):
    """Loads its state in another way than torch does."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


def hooked(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """Make an optimizer that has more in its state dict than its class puts there."""
    optimizer = torch.optim.SGD(parameters, **settings)
    optimizer.register_state_dict_post_hook(lambda _, content: {**content, "steps": 0})
    return optimizer


@pytest.mark.parametrize("make", [Saving, Quantized, hooked])
def test_an_optimizer_with_a_state_dict_of_its_own_is_refused_when_it_is_made(make: Any) -> None:
    with pytest.raises(ValueError, match=r"has a state_dict.* of its own"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], make, lr=0.1)


@pytest.mark.parametrize("use", ["step", "held_state", "state_dict"])
def test_parameters_that_change_places_while_the_state_is_divided_are_refused(use: str) -> None:
    first, second = ([nn.Parameter(torch.ones(2))] for _ in range(2))
    optimizer = ZeroRedundancyOptimizer([{"params": first}, {"params": second, "lr": 0.1}], torch.optim.Adam)
    swap(optimizer)
    optimizer.step()
    optimizer.divide(divided(0, 3))
    swap(optimizer)
    with pytest.raises(TrainingCodeError, match="changed their number, sizes or order"):
        getattr(optimizer, use)()


def swap(optimizer: torch.optim.Optimizer) -> None:
    one, other = optimizer.param_groups
    one["params"], other["params"] = other["params"], one["params"]


def test_a_new_parameter_may_take_the_place_of_an_old_one_and_groups_may_share_theirs_otherwise() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = ZeroRedundancyOptimizer([{"params": parameters[:1]}, {"params": parameters[1:]}], torch.optim.Adam)
    optimizer.divide(divided(0, 3))
    optimizer.param_groups[1]["params"][0] = nn.Parameter(torch.ones(2))
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))
    assert optimizer.held_state() == {}


class Lookahead:
    """A wrapper that saves its own state and, if it ``saves_all``, that of its optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, saves_all: bool) -> None:
        self.optimizer, self.saves_all, self.calls = optimizer, saves_all, 0

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, **({"optimizer": self.optimizer.state_dict()} if self.saves_all else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_a_state_dict_that_includes_the_optimizers_is_refused_beside_it() -> None:
    """It was gathered in each commit, and the first change of the world ended the job, with an error of Gloo's."""
    optimizer = ZeroRedundancyOptimizer(net().parameters(), torch.optim.Adam)
    check_saved_once({"optimizer": optimizer, "wrapper": [Lookahead(optimizer, saves_all=False)]})
    check_saved_once({"wrapper": Lookahead(optimizer, saves_all=True)})  # nothing divides it there
    with pytest.raises(
        TrainingCodeError, match=r"state_dict\(\) of state.wrapper\[0\] \(Lookahead\) calls that of a Zero"
    ):
        check_saved_once({"optimizer": optimizer, "wrapper": [Lookahead(optimizer, saves_all=True)]})


def test_a_scheduler_of_the_optimizer_inside_which_would_change_nothing_is_refused() -> None:
    schedulers = []

    def scheduled(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, **settings)
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        return optimizer

    optimizer = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], scheduled, lr=0.1)
    with pytest.raises(TrainingCodeError, match="give it the ZeroRedundancyOptimizer"):
        optimizer.step()
