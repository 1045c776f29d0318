"""Models and optimizers that change in mid-training: newcomers follow, survivors go back, and what cannot be told is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from worker_stage import Stage, on_stage

from spark_elastic.errors import TrainingCodeError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.optimizers.zero import ZeroRedundancyOptimizer
from spark_elastic.worker.state.snapshot import find_objects
from spark_elastic.worker.state.structure import follow
from spark_elastic.worker.state.torch_state import TorchState


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(4, 2)
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.bend = torch.nn.LeakyReLU(0.1)
        self.head = torch.nn.Linear(2, 3)
        self.words.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bend(self.body(self.words(x))))


def make(commit: str = "copy") -> TorchState:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.module.body.parameters(), lr=0.1)
    return TorchState(models=[model], optimizer=optimizer, step=0, commit=commit)


def net(state: TorchState) -> Any:
    return state.models[0].module


def step(state: TorchState) -> None:
    state.optimizer.zero_grad()
    state.models[0](torch.arange(4)).square().sum().backward()
    state.optimizer.step()


def add_a_group(state: TorchState) -> None:
    state.optimizer.add_param_group({"params": list(net(state).head.parameters()), "lr": 0.5})


def replace_the_head(state: TorchState) -> None:
    net(state).head = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.ReLU(), torch.nn.Linear(5, 7))
    add_a_group(state)


def replace_the_optimizer(state: TorchState) -> None:
    net(state).head = torch.nn.Linear(2, 9)
    state.optimizer = torch.optim.Adam(state.models[0].parameters(), lr=0.3)


def grow_the_embedding(state: TorchState) -> None:
    old = net(state).words.weight
    grown = torch.nn.Embedding(6, 2)
    with torch.no_grad():
        grown.weight[:4] = old
    net(state).words = grown
    state.optimizer.add_param_group({"params": [grown.weight]})


def grow_the_parameter(state: TorchState) -> None:
    net(state).words.weight.data = torch.randn(6, 2)
    net(state).words.num_embeddings = 6


def unfreeze(state: TorchState) -> None:
    net(state).words.weight.requires_grad = True
    state.optimizer.add_param_group({"params": [net(state).words.weight]})


def change_the_dtype(state: TorchState) -> None:
    net(state).head.double()


def replace_the_activation(state: TorchState) -> None:
    net(state).bend = torch.nn.Tanh()


def change_the_slope(state: TorchState) -> None:
    net(state).bend.negative_slope = 0.9


def unfreeze_under_a_hook_that_cannot_travel(state: TorchState) -> None:
    lock = threading.Lock()
    net(state).words.register_forward_hook(lambda *_: lock.locked() or None)
    unfreeze(state)


CHANGES = [
    replace_the_activation,
    change_the_slope,
    unfreeze_under_a_hook_that_cannot_travel,
    add_a_group,
    replace_the_head,
    replace_the_optimizer,
    grow_the_embedding,
    grow_the_parameter,
    unfreeze,
    change_the_dtype,
]


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage() as stage:
        yield stage


def begun(stage: Stage, commit: str = "copy") -> TorchState:
    stage.models.clear()
    state = make(commit)
    state._prepare()
    stage.begin(state)
    return state


def sent(state: TorchState) -> tuple[Any, bytes | None]:
    """What a holder sends."""
    return state._keeper.current.content(), state._tell()


def same(one: TorchState, other: TorchState) -> None:
    mine, others = net(one).state_dict(), net(other).state_dict()
    assert list(mine) == list(others)
    for name, tensor in mine.items():
        assert tensor.dtype == others[name].dtype
        assert torch.equal(tensor, others[name]), name
    grads = [[p.requires_grad for p in net(state).parameters()] for state in (one, other)]
    assert grads[0] == grads[1]
    states = [state.optimizer.state_dict() for state in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for number, entries in states[0]["state"].items():
        for key, tensor in entries.items():
            assert torch.equal(tensor, states[1]["state"][number][key])


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_newcomer_follows_a_change_and_trains_on_like_the_others(
    stage: Stage, change: Callable[[TorchState], None]
) -> None:
    survivor = begun(stage)
    step(survivor)
    survivor.commit()
    change(survivor)
    if change is not change_the_dtype:
        step(survivor)
    survivor.commit()
    stage.arriving, stage.told = sent(survivor)
    assert stage.told is not None
    stage.control.commit = None
    newcomer_models = stage.models[:]
    stage.models.clear()
    newcomer = make()
    kept = newcomer.models[0], newcomer.optimizer, net(newcomer).body[0].weight
    newcomer._prepare()
    stage.begin(newcomer, rank=1, others=[CommitId(3, 4)])
    same(newcomer, survivor)
    assert kept[0] is newcomer.models[0]
    assert kept[1] is newcomer.optimizer
    assert kept[2] is net(newcomer).body[0].weight
    assert net(newcomer).words.num_embeddings == net(survivor).words.num_embeddings
    if change is change_the_dtype:
        return
    names = {id(p): n for n, p in net(newcomer).named_parameters()}
    assert all(id(p) in names for group in newcomer.optimizer.param_groups for p in group["params"])
    step(newcomer)
    stage.models[:] = newcomer_models
    stage.finished = True
    step(survivor)
    same(newcomer, survivor)


def test_a_model_that_has_not_changed_is_not_told(stage: Stage) -> None:
    state = begun(stage)
    for _ in range(3):
        step(state)
        state.commit()
    assert state._tell() is None


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_survivor_goes_back_to_what_it_was_before_a_change_that_no_commit_holds(
    stage: Stage, change: Callable[[TorchState], None], has_stepped: bool
) -> None:
    state = begun(stage)
    step(state)
    state.commit()
    shapes = {name: (p.shape, p.dtype) for name, p in net(state).named_parameters()}
    held = {name: tensor.clone() for name, tensor in net(state).state_dict().items()}
    optimizer, groups = state.optimizer, len(state.optimizer.param_groups)
    numbers = list(optimizer.state_dict()["state"])
    change(state)
    if has_stepped and change is not change_the_dtype:
        step(state)
    state.restore()
    assert shapes == {name: (p.shape, p.dtype) for name, p in net(state).named_parameters()}
    assert all(torch.equal(held[name], tensor) for name, tensor in net(state).state_dict().items())
    assert state.optimizer is optimizer
    assert len(optimizer.param_groups) == groups
    assert list(optimizer.state_dict()["state"]) == numbers
    step(state)


def bring_a_new_object(state: TorchState) -> None:
    state.ema = torch.nn.Linear(1, 1)


def change_the_kind(state: TorchState) -> None:
    state.optimizer = torch.optim.SGD(state.models[0].parameters(), lr=0.1)


def step_what_no_module_holds(state: TorchState) -> None:
    state.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


class Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Fussy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0


@pytest.mark.parametrize("kind", [Loss, torch.nn.Tanh])
def test_parts_without_tensors_that_the_function_makes_on_each_rank_need_not_travel(stage: Stage, kind: Any) -> None:
    state = begun(stage)
    for name in ("loss", "bend"):
        setattr(net(state), name, kind())
        state.commit()
    told = state._tell()
    assert (told is None) == (kind is Loss)
    if told is not None:
        newcomer = make()
        follow(find_objects({"models": newcomer.models, "optimizer": newcomer.optimizer}), told)
        assert isinstance(net(newcomer).bend, kind)


def test_what_a_part_of_the_users_has_counted_is_each_ranks_own(stage: Stage) -> None:
    stage.models.clear()
    state = make()
    net(state).count = Fussy()
    state._prepare()
    stage.begin(state)
    net(state).count.seen = 3
    state.commit()
    assert state._tell() is None


def hold_what_cannot_travel(state: TorchState) -> None:
    net(state).head = torch.nn.Linear(2, 11)
    net(state).head.entries = (entry for entry in ())


class LockedLinear(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        self.lock = threading.Lock()


def replace_a_part_by_one_that_cannot_travel(state: TorchState) -> None:
    net(state).head = LockedLinear()


@pytest.mark.parametrize("commit", ["copy", "in_place"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (bring_a_new_object, r"state\.ema, a Linear, has come into the State after the job began"),
        (change_the_kind, r"state\.optimizer was a Adam when the job began and is a SGD"),
        (step_what_no_module_holds, r"state\.optimizer steps new parameters that are in no module of the State"),
        (hold_what_cannot_travel, r"state\.models\[0\] has changed since the job began, and the change cannot be told"),
        (replace_a_part_by_one_that_cannot_travel, r"state\.models\[0\] has changed .* cannot be told.*cannot pickle"),
    ],
)
def test_what_cannot_be_told_is_an_error_at_the_commit(
    stage: Stage, change: Callable[[TorchState], None], words: str, commit: str
) -> None:
    state = begun(stage, commit)
    state.commit()
    change(state)
    with pytest.raises(TrainingCodeError, match=words):
        state.commit()


def test_a_divided_optimizer_of_another_class_is_an_error_at_the_commit(stage: Stage) -> None:
    model = DistributedDataParallel(Net())
    state = TorchState(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam))
    state._prepare()
    stage.begin(state)
    state.commit()
    state.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.NAdam)
    named = "a ZeroRedundancyOptimizer of Adam when the job began and is a ZeroRedundancyOptimizer of NAdam"
    with pytest.raises(TrainingCodeError, match=named):
        state.commit()


def test_a_rank_that_is_behind_follows_a_change_after_which_fewer_parameters_are_stepped(stage: Stage) -> None:
    ahead, behind = begun(stage), begun(stage)
    for state in (ahead, behind):
        state.optimizer = torch.optim.Adam(net(state).body.parameters(), lr=0.1)
        net(state).body(torch.ones(3, 2)).sum().backward()
        state.optimizer.step()
    ahead.optimizer = torch.optim.Adam(net(ahead).body[0].parameters(), lr=0.3)
    told = ahead._tell()
    assert told is not None
    follow(find_objects({"models": behind.models, "optimizer": behind.optimizer}), told)
    assert list(behind.optimizer.state_dict()["state"]) == [0, 1]


@pytest.mark.parametrize("change", [replace_the_head, replace_the_optimizer, grow_the_embedding, add_a_group])
def test_what_a_newcomer_is_told_belongs_to_the_commit_that_it_gets(
    stage: Stage, change: Callable[[TorchState], None]
) -> None:
    """A rank that keeps slices cannot load an earlier commit before it has been told of."""
    state = begun(stage)
    step(state)
    state.commit()
    held = state._keeper.current
    change(state)
    assert state._tell() is not None
    assert held.put_back is not None
    held.put_back()
    assert state._tell(held.places) is None


def test_a_part_that_is_in_the_state_twice_has_not_changed() -> None:
    """The places of objects are found in another order than the objects."""
    one, other, scale = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(()))
    net = torch.nn.Sequential(one, other)
    optimizer = torch.optim.SGD([*net.parameters(), scale])
    state = TorchState(parts={"one": one, "other": other}, net=net, scale=scale, optimizer=optimizer)
    state._prepare()
    assert state._tell() is None
