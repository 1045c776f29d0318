"""How a State keeps commits whose optimizer is divided among the ranks, whichever way of keeping them was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from trained_state import equal
from worker_stage import Stage, on_stage

from spark_elastic import ObjectState, SparkElasticError, TorchState, ZeroRedundancyOptimizer
from spark_elastic.protocol.messages import CommitId, Slices
from spark_elastic.worker.state.keepers import KEEPERS, OnDevice
from spark_elastic.worker.state.keepers.sharded import Sharded

SIZE = 4


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage() as stage:
        stage.max_np = SIZE
        yield stage


def net() -> tuple[torch.nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(SIZE)), torch.nn.BatchNorm1d(8))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)


def step(state: Any) -> None:
    """Step without sharing weights, which takes other ranks."""
    state.optimizer.zero_grad()
    state.model(torch.rand(4, 8)).sum().backward()
    state.optimizer._update()


def begun(stage: Stage, commit: str = "copy", **settings: Any) -> TorchState:
    """Return the state of rank 0 of a first world of four, after a commit."""
    model, optimizer = net()
    state = TorchState(model, optimizer, commit=commit, **settings)
    state._prepare()
    stage.begin(state, others=[None] * (SIZE - 1))
    state._checks = None  # which would have the model wrapped
    step(state)
    state.commit()
    return state


def values(state: TorchState) -> list[torch.Tensor]:
    assert isinstance(state.optimizer, ZeroRedundancyOptimizer)
    held = [value for entry in state.optimizer.held_state().values() for value in entry.values()]
    return [value.clone() for value in (*state.model.state_dict().values(), *held)]


def sliced_and_whole(state: TorchState) -> tuple[int, int, int]:
    """The elements of a commit that are kept of slices, whole, and of the parts of the optimizer's state."""
    keeper = state._keeper
    assert isinstance(keeper, Sharded)
    kept = keeper.current
    slices = sum(flat.numel() for flats in kept.slices.flats.values() for flat in flats)
    whole, parts = (sum(flat.numel() for flat in room.flats) for room in (kept.buffer, kept.parts.buffer))
    return slices, whole, parts


@pytest.mark.parametrize(("commit", "redundancy"), [("copy", 1), ("copy", 2), ("host", 1)])
def test_a_rank_copies_its_parts_of_the_optimizers_state_and_all_the_rest_whole(
    stage: Stage, commit: str, redundancy: int
) -> None:
    state = begun(stage, commit, redundancy=redundancy)
    slices, whole, parts = sliced_and_whole(state)
    weights = sum(parameter.numel() for parameter in state.model.parameters())
    assert (slices, whole) == (0, sum(tensor.numel() for tensor in state.model.state_dict().values()))
    assert parts == pytest.approx(2 * weights * (redundancy + 1) / SIZE, rel=0.2)  # two moments
    assert state._keeper.slices == tuple(
        Slices(CommitId(1, index), tuple(range(redundancy + 1)), SIZE) for index in (1, 0)
    )
    kept = state._keeper.current.buffer  # type: ignore[attr-defined]
    assert kept.on_host is (commit == "host")


def test_in_place_a_rank_copies_slices_because_in_a_step_nobody_has_anything_whole(stage: Stage) -> None:
    state = begun(stage, "in_place")
    slices, _, parts = sliced_and_whole(state)
    weights = sum(parameter.numel() for parameter in state.model.parameters())
    assert slices == pytest.approx(2 * weights / SIZE, abs=SIZE)
    assert parts == pytest.approx(2 * 2 * weights / SIZE, rel=0.2)
    step(state)
    step(state)
    state.commit()


@pytest.mark.parametrize("commit", ["copy", "host"])
def test_a_restore_puts_weights_and_parts_back_without_asking_anybody(stage: Stage, commit: str) -> None:
    state = begun(stage, commit)
    committed = values(state)
    for _ in range(2):
        step(state)
        assert not equal(values(state), committed)
        state.restore()
        assert equal(values(state), committed)


def test_after_a_restore_a_rank_lacks_parts_of_the_last_commit_only(stage: Stage) -> None:
    state = begun(stage)
    step(state)
    state.restore()
    assert stage.control.slices == (Slices(CommitId(1, 1), (0, 1), SIZE, True), Slices(CommitId(1, 0), (0, 1), SIZE))


@pytest.mark.parametrize("commit", list(KEEPERS))
def test_a_fixed_world_and_a_script_keep_commits_as_they_were_asked_to(stage: Stage, commit: str) -> None:
    model, optimizer = net()
    stage.is_fixed = True
    state = TorchState(model, optimizer, commit=commit)
    state._prepare()
    assert type(state._keeper) is KEEPERS[commit]


@pytest.mark.parametrize(("max_np", "redundancy"), [(2, 1), (3, 2)])
def test_a_job_that_is_never_large_enough_to_divide_anything_keeps_commits_as_it_was_asked_to(
    stage: Stage, max_np: int, redundancy: int
) -> None:
    model, optimizer = net()
    stage.max_np = max_np
    state = TorchState(model, optimizer, commit="in_place", redundancy=redundancy)
    state._prepare()
    assert type(state._keeper) is KEEPERS["in_place"]


def test_an_object_state_takes_a_divided_optimizer_too(stage: Stage) -> None:
    model, optimizer = net()
    state = ObjectState(model=model, all=[optimizer])
    state._prepare()
    stage.begin(state, others=[None] * (SIZE - 1))
    assert len(optimizer.held_state()) == 0  # no step yet
    assert optimizer.division is not None


def test_a_way_of_keeping_commits_that_cannot_be_divided_is_refused_with_those_that_can(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(OnDevice):
        name = "own"

    monkeypatch.setitem(KEEPERS, "own", Own)
    model, optimizer = net()
    with pytest.raises(
        SparkElasticError, match=r'commit="own" keeps no optimizer.*one of copy, host, in_place, sharded'
    ):
        TorchState(model, optimizer, commit="own")._prepare()
