"""TorchState: models and optimizers go back in place; random numbers are each rank's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from trained_state import equal, step, trained, values
from worker_stage import on_stage

from spark_elastic import TorchState
from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import TrainingCodeError, WorkerLostError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel


@pytest.mark.parametrize("synced", [False, True])
def test_outside_a_job_a_restore_before_the_first_commit_goes_back_to_the_beginning_or_the_last_sync(
    synced: bool,
) -> None:
    state = trained()
    before = values(state)
    if synced:
        step(state)
        before = values(state)
        state.epoch = 7
        state.sync()
    step(state)
    state.epoch = 8
    state.restore()
    assert state.epoch == (7 if synced else 0)
    if synced:
        assert equal(values(state), before)


@pytest.mark.parametrize("commit", ["copy", "host"])
def test_models_and_optimizers_go_back_in_place_with_their_gradients_cleared(commit: str) -> None:
    state = trained(commit=commit)
    model, parameter = state.model, state.model.weight
    state.commit()
    before = values(state)
    step(state)
    assert not equal(values(state), before)
    state.restore()
    assert equal(values(state), before)
    assert state.model is model
    assert state.model.weight is parameter
    assert parameter.grad is None


def test_training_after_a_restore_gives_the_same_weights() -> None:
    state = trained()
    state.commit()
    step(state)
    expected = values(state)
    state.restore()
    step(state)
    assert equal(values(state), expected)


def test_random_numbers_go_back_with_a_restore() -> None:
    state = trained()
    state.commit()
    drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
    state.restore()
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn


def test_several_models_may_be_given_under_other_names() -> None:
    state = TorchState(generator=torch.nn.Linear(1, 1), critic=torch.nn.Linear(1, 1))
    state.commit()
    weight = state.critic.weight.detach().clone()
    torch.nn.init.zeros_(state.critic.weight)
    state.restore()
    assert torch.equal(state.critic.weight, weight)


def test_what_was_not_given_is_none() -> None:
    state = TorchState(scheduler=None)
    assert [state.model, state.optimizer, state.scheduler, state.loader] == [None] * 4
    with pytest.raises(AttributeError, match="'TorchState' object has no attribute 'epoch'"):
        _ = state.epoch


def test_an_unknown_kind_of_commit_is_refused() -> None:
    with pytest.raises(ValueError, match="commit"):
        TorchState(commit="other")


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler", "loader"])
def test_an_object_that_cannot_play_its_part_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must .* int"):
        TorchState(**{name: 3})


def lose_a_peer(old: int, new: int) -> None:
    """A reset callback that reduces something, and meets a peer that dies."""
    raise WorkerLostError("a peer died")


def test_a_repaired_laggard_keeps_its_own_random_numbers_when_a_peer_is_lost_then() -> None:
    with on_stage() as stage:
        state = TorchState(epoch=0)
        stage.begin(state)
        for seed in (1, 2):
            torch.manual_seed(seed)
            state.commit()
        expected = torch.rand(1).item()
        state.restore()
        state.register_reset_callbacks([lose_a_peer])
        stage.arriving = {"steps": 3, "size": 1, "objects": {"epoch": 3}}
        with pytest.raises(WorkerLostError):
            stage.begin(state, others=[CommitId(1, 3)])
        state.restore()
        assert torch.rand(1).item() == expected


def test_a_tensor_that_others_hold_is_restored_in_place() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state = TorchState(w=weight)
    state.commit()
    with torch.no_grad():
        weight.zero_()
    state.restore()
    assert state.w is weight
    assert weight.tolist() == [1.0, 1.0]


def test_loaders_in_containers_take_their_ranks_share() -> None:
    loaders = [ElasticDataLoader(range(12), 2) for _ in range(3)]
    state = TorchState(loader=loaders[0], others={"labelled": loaders[1], "rest": [loaders[2]]})
    state._enter_world(1, 3)
    assert [len(loader) for loader in loaders] == [2, 2, 2]


def drawn(generation: int, rank: int) -> tuple[float, float, float]:
    """What a newcomer draws first; every worker starts from the same seeds."""
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    state = TorchState(step=0)
    world: Any = SimpleNamespace(generation=generation, rank=rank)
    state._own_as_newcomer(world)
    return random.random(), float(numpy.random.random()), float(torch.rand(1))


def test_newcomers_draw_random_numbers_of_their_own_rank_and_generation() -> None:
    places = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        drawings = [drawn(*place) for place in places]
        again = [drawn(*place) for place in places]
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])
    assert drawings == again
    for kind in zip(*drawings, strict=True):
        assert len(set(kind)) == len(places)


class RowsOnly:
    """A loader of another library that tells its rows, and nothing else."""

    batch_rows = (3, 1)


class Reports(RowsOnly):
    """One that is checked at commits, too."""

    def __init__(self) -> None:
        self.confirmed: list[Any] = []

    def report(self) -> tuple[int, int, int, int]:
        return 1, 2, 3, 4

    def confirm(self, reports: Any) -> None:
        self.confirmed.append(list(reports))


def test_a_loader_is_asked_for_what_it_has() -> None:
    with on_stage() as stage:
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        state = TorchState(model=model, loader=RowsOnly())
        stage.begin(state)
        assert model._row_source is state.loader
        state.commit()
        state.loader = Reports()  # in mid-generation
        state.commit()
        state.commit()
        assert state.loader.confirmed[-1] == [(1, 2, 3, 4)]


class Stream:
    """A loader with a position and nothing else, as torchdata's is."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_a_loader_that_takes_the_place_of_another_one_is_refused_unless_the_state_has_had_it_from_the_start() -> None:
    """It has the rows of all ranks. After a loss it would have a share, and a newcomer the rows of the first loader."""
    easy, hard = ElasticDataLoader(range(8), 2), ElasticDataLoader(range(8), 2)
    state = TorchState(loader=easy, hard=hard)
    with on_stage() as stage:
        stage.begin(state)
        state.loader, state.hard = state.hard, state.loader
        state.commit()
        state.loader = ElasticDataLoader(range(8, 16), 2)
        with pytest.raises(TrainingCodeError, match=r"state\.loader is another loader than when the job began"):
            state.commit()


class Batches(Stream):
    """Such a loader that one sees to be one."""

    def __iter__(self) -> Iterator[int]:
        yield from range(4)


class Sampler(Batches, torch.utils.data.Sampler[int]):
    """Chooses rows and has a position."""


def test_what_is_kept_of_a_loader_that_knows_nothing_of_ranks_is_said_where_the_state_is_made() -> None:
    with pytest.warns(UserWarning, match=r"state\.loader \(Stream\) knows nothing of ranks"):
        TorchState(loader=Stream())
    with pytest.warns(UserWarning, match="It shuffles, and ranks may come to shuffle differently, even without a loss"):
        TorchState(loader=StatefulDataLoader([1, 2], shuffle=True))


def test_what_is_kept_of_such_a_loader_is_said_of_each_one_in_the_state() -> None:
    with pytest.warns() as told:
        TorchState(loader=ElasticDataLoader([1, 2], 1), other=Batches(), more=[StatefulDataLoader([1, 2])])
    said = [text.partition(" knows nothing of ranks") for text in (str(warning.message) for warning in told)]
    assert [name for name, found, _ in said if found] == ["state.other (Batches)", "state.more[0] (StatefulDataLoader)"]


def test_a_shuffling_loader_that_has_loaded_a_position_draws_another_second_epoch_as_the_warning_says() -> None:
    def loader() -> Any:
        return StatefulDataLoader(range(40), shuffle=True, generator=torch.Generator().manual_seed(4))  # type: ignore[arg-type]

    first, other = loader(), loader()
    other.load_state_dict(first.state_dict())
    epochs = [[[int(batch) for batch in each] for each in (first, other)] for _ in range(2)]
    assert [saved == loaded for saved, loaded in epochs] == [True, False]


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_a_loader_of_ours_nor_of_one_that_each_rank_keeps_for_itself() -> None:
    TorchState(loader=ElasticDataLoader([1, 2], 1))
    TorchState(loader=Stream(), local="loader")
    TorchState(local={"loader": Stream(), "other": Batches()})


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_modules_containers_and_samplers_that_have_a_state_and_may_be_iterated() -> None:
    TorchState(model=torch.nn.Sequential(), both=Both(), sampler=Sampler())


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler", "loader"])
def test_a_class_in_place_of_an_object_is_refused(name: str) -> None:
    kind = {"model": torch.nn.Linear, "loader": ElasticDataLoader}.get(name, torch.optim.SGD)
    with pytest.raises(
        TypeError, match=rf"{name} must be an object, not the class {kind.__name__}: write {kind.__name__}\("
    ):
        TorchState(**{name: kind})


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler"])
@pytest.mark.parametrize("several", [[1, 2], (1, 2), {"first": 1}], ids=["list", "tuple", "dict"])
def test_several_objects_in_one_argument_are_refused_with_how_to_give_them(name: str, several: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be one object, not a {type(several).__name__}: .*{name}_2="):
        TorchState(**{name: several})


class Both(list[torch.optim.Optimizer]):
    """Two optimizers that are kept as one."""

    def state_dict(self) -> list[Any]:
        return [each.state_dict() for each in self]

    def load_state_dict(self, states: list[Any]) -> None:
        for each, kept in zip(self, states, strict=True):
            each.load_state_dict(kept)


def test_a_list_that_has_a_state_of_its_own_is_one_object() -> None:
    optimizer = Both(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    state = TorchState(optimizer=optimizer)
    state._values(shared=True)
    assert state.optimizer is optimizer


def test_modules_of_torchscript_are_kept() -> None:
    """Their registers of parts have keys, and cannot be iterated over."""
    net = torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(1, 2))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = TorchState(model=net, optimizer=optimizer)
    kept = []
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        kept.append(net.weight.detach().clone())
        state.commit()
    with torch.no_grad():
        net.weight.zero_()
    state.restore()
    assert torch.equal(net.weight, kept[-1])
