"""What a rank keeps of a commit in slices, and when it takes its live values for that commit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trained_state import equal, step, trained, values
from worker_stage import Stage, on_stage

from spark_elastic import HostsUpdatedInterrupt, TorchState, ZeroRedundancyOptimizer
from spark_elastic.checkpoint.best import Metric
from spark_elastic.checkpoint.parts import encode_part
from spark_elastic.errors import CheckpointError, SparkElasticError, StateLostError, WorkerLostError
from spark_elastic.protocol.messages import CommitId, Member, Slices
from spark_elastic.worker.state.keepers import sharded
from spark_elastic.worker.state.keepers.sharded import Sharded, place_in_ring

SIZE = 4


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage() as stage:
        stage.max_np = SIZE
        yield stage


def begun(
    stage: Stage, size: int = SIZE, redundancy: int = 1, parts: int = 3, make: Any = torch.optim.Adam
) -> TorchState:
    """Return the state of rank 0 of a first world, after a commit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(parts)), torch.nn.BatchNorm1d(8))
    state = TorchState(model=model, optimizer=make(model.parameters()), commit="sharded", redundancy=redundancy)
    stage.begin(state, others=[None] * (size - 1))
    state._checks = None  # which would have the model wrapped
    train(state)
    return state


def train(state: TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.rand(4, 8)).sum().backward()
    state.optimizer.step()
    state.commit()


def kept(state: TorchState) -> Sharded:
    keeper = state._keeper
    assert isinstance(keeper, Sharded)
    return keeper


def interrupt(stage: Stage, state: TorchState) -> None:
    stage.peers = lambda mine: [[1, *mine[1:]]]
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()


@pytest.mark.parametrize(("redundancy", "held"), [(1, (0, 1)), (2, (0, 1, 2))])
def test_a_rank_keeps_its_slices_of_parameters_and_moments_and_buffers_whole(
    stage: Stage, redundancy: int, held: tuple[int, ...]
) -> None:
    state = begun(stage, redundancy=redundancy)
    assert kept(state).slices == (Slices(CommitId(1, 1), held, SIZE), Slices(CommitId(1, 0), held, SIZE))
    weights = list(state.model.parameters())
    total = sum(weight.numel() for weight in weights) * 3 + len(weights)  # two moments, and the number of the step
    sliced = sum(flat.numel() for flats in kept(state).current.slices.flats.values() for flat in flats)
    assert sliced == pytest.approx(total * len(held) / SIZE, abs=len(held))
    assert all(map(torch.equal, kept(state).current.buffer.views, state.model.buffers()))


def test_newcomers_are_told_of_the_commit_that_they_get_also_where_its_holders_have_gone_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    state = TorchState(model=model, optimizer=torch.optim.Adam(model.parameters()), commit="sharded")
    state._prepare()
    stage.begin(state, others=[None] * (SIZE - 1))
    state._checks = None
    train(state)
    held = kept(state)._current.commit
    assert held is not None
    state.optimizer = torch.optim.Adam(model[1].parameters())
    train(state)
    assert state._tell() is not None
    told = []

    def gather(world: Any, plan: Any, mine: Any, *_: object) -> None:
        told.append(mine.told)
        raise WorkerLostError("another rank was lost")

    monkeypatch.setattr(sharded, "gather", gather)
    monkeypatch.setattr(sharded, "plan_gather", lambda *_: None)
    world: Any = SimpleNamespace(newest_commit=held, members=[SimpleNamespace(commit=held)] * 2)
    with pytest.raises(WorkerLostError):
        kept(state).catch_up(world, {}, state._tell)
    assert told == [None]


def divisible(parameters: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam)


@pytest.mark.parametrize("make", [torch.optim.Adam, divisible])
@pytest.mark.parametrize(("size", "redundancy"), [(1, 1), (2, 1), (3, 2)])
def test_in_a_small_world_each_rank_goes_back_by_itself(stage: Stage, size: int, redundancy: int, make: Any) -> None:
    state = begun(stage, size, redundancy, make=make)
    committed = values(state)
    state.model(torch.rand(4, 8)).sum().backward()
    state.optimizer.step()
    assert not equal(values(state), committed)
    state.restore()
    assert equal(values(state), committed)


def test_after_a_loss_a_rank_offers_its_slices_and_loads_nothing_by_itself(stage: Stage) -> None:
    state = begun(stage)
    assert kept(state).to_restore() is None
    state.restore()
    assert stage.control.slices == kept(state).slices
    assert not any(slices.is_whole for slices in kept(state).slices)


def test_a_function_that_wants_to_go_back_by_itself_is_told_that_a_rank_has_slices_only(stage: Stage) -> None:
    state = begun(stage)
    with pytest.raises(SparkElasticError, match=r'commit="sharded": each rank has kept slices .*; use commit="copy"'):
        state._enter(state.restore)
    state.restore()  # as elastic does it, ahead of a sync


def test_after_a_planned_change_a_rank_has_the_whole_commit(stage: Stage) -> None:
    state = begun(stage)
    interrupt(stage, state)
    committed = values(state)
    state.model[-1].running_mean.fill_(9.0)  # by code on its way out
    state.restore()
    assert stage.control.slices[0] == Slices(stage.control.commit, (0,), 1)
    assert equal(values(state), committed)
    assert not (state.model[-1].running_mean == 9.0).any()
    state.restore()
    assert stage.control.slices[0].is_whole, "also where the next world breaks before it is synced"


@pytest.mark.parametrize("place", [0, -1])
def test_a_change_that_bumps_no_version_counter_shows_wherever_it_is(stage: Stage, place: int) -> None:
    state = begun(stage)
    interrupt(stage, state)
    list(state.model.parameters())[place].data[-1] += 1.0
    state.restore()
    assert not stage.control.slices[0].is_whole


def test_a_torn_commit_is_not_offered(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    state = begun(stage)
    monkeypatch.setattr("spark_elastic.worker.state.slices.SliceBuffer.copy_from", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        state.commit()
    assert [slices.commit for slices in kept(state).slices] == [CommitId(1, 1)]


def test_a_rank_that_lost_slices_does_not_begin_the_job_anew_from_what_it_happens_to_have(stage: Stage) -> None:
    state = begun(stage)
    stage.control.commit = None
    with pytest.raises(StateLostError, match="slices of the newest commit were lost"):
        stage.begin(state, others=[None])


def test_commits_without_a_reduction_before_them_wait_for_all_ranks(stage: Stage) -> None:
    state = begun(stage)
    met: list[int] = []
    stage.world.meet = lambda: met.append(state._commits.index)
    state.commit()
    stage.has_met = True
    state.commit()
    assert met == [1]


def test_weights_that_changed_after_the_last_commit_are_not_written_as_a_durable_checkpoint(stage: Stage) -> None:
    state = begun(stage)
    lent = state._lend().lend().content()["objects"]["model"].content
    assert all(map(torch.equal, lent.values(), state.model.state_dict().values()))
    with torch.no_grad():
        next(state.model.parameters()).add_(1.0)
    with pytest.raises(SparkElasticError, match="commit after the last change"):
        state._lend().lend()


def test_a_divided_optimizer_and_the_best_checkpoint_do_not_go_together(stage: Stage) -> None:
    model = torch.nn.Linear(2, 1)
    state = TorchState(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam), commit="sharded")
    stage.checkpoints = SimpleNamespace(metric=object())
    with pytest.raises(CheckpointError, match="checkpoint_best= cannot be given with a ZeroRedundancyOptimizer"):
        state._prepare()


def stepped(parts: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model, and an optimizer that has stepped above the elastic function."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(parts)))
    optimizer = divisible(model.parameters())
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [entry["exp_avg"].clone() for entry in optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize("commit", ["sharded", "copy"])
@pytest.mark.parametrize("size", [2, SIZE])
@pytest.mark.parametrize(
    ("place", "method"),
    [(TorchState, "_enter_world"), (Sharded, "release_live")],
    ids=["before any rank has sealed the generation", "when this rank has sealed it and others have not"],
)
def test_a_loss_before_the_first_generation_is_sealed_takes_no_state_of_an_optimizer_with_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, place: type, method: str, size: int, commit: str
) -> None:
    model, optimizer = stepped()
    before = moments(optimizer)
    state = TorchState(model, optimizer, commit=commit)
    state._prepare()

    def lost(*_: object) -> None:
        raise WorkerLostError("rank 1")

    with monkeypatch.context() as patch:
        patch.setattr(place, method, lost)
        for formed in (SIZE, size):
            with pytest.raises(WorkerLostError):
                stage.begin(state, others=[None] * (formed - 1))
            state.restore()
            stage.control.commit = None  # as the driver says, because slices are missing
    stage.begin(state, others=[None])
    assert equal(moments(optimizer), before)


def test_once_the_first_generation_is_sealed_a_rank_holds_its_parts_of_an_optimizers_state_only(stage: Stage) -> None:
    model, optimizer = stepped()
    all_moments = [weakref.ref(optimizer.state[parameter]["exp_avg"]) for parameter in model.parameters()]
    stage.begin(TorchState(model, optimizer, commit="sharded"), others=[None] * (SIZE - 1))
    assert sum(moment() is not None for moment in all_moments) == len(optimizer.state) < len(all_moments)


def divided(stage: Stage, checkpoints: Any) -> TorchState:
    """Return the state of rank 0, whose optimizer is divided among four, and which writes durable checkpoints."""
    model, optimizer = stepped()
    state = TorchState(model, optimizer, commit="sharded")
    stage.checkpoints = checkpoints
    stage.begin(state, others=[None] * (SIZE - 1))
    return state


@pytest.mark.parametrize("lacks", [True, False])
def test_all_ranks_write_the_commit_that_they_have_agreed_on_and_the_last_one_if_that_is_lacking(
    stage: Stage, lacks: bool
) -> None:
    begun: list[tuple[CommitId, int, str]] = []
    checkpoints = SimpleNamespace(
        metric=None, restore=lambda device: None, is_due=lambda: True, wait=lambda is_over: None,
        lacks=lambda steps: lacks, expect_last_part=lambda rank, steps: None,
        begin_part=lambda commit, part, meeting: begun.append((commit, part.skeleton["steps"], meeting._name)),
    )  # fmt: skip
    state = divided(stage, checkpoints)
    for _ in range(3):  # rank 0 asks at the first one, all agree at the second, and the third is written
        state.commit()
    assert begun == [(CommitId(1, 3), 3, "part 1")]
    wishes: dict[str, str] = {}
    stage.world.store = SimpleNamespace(set=wishes.__setitem__)
    state.commit()
    state._leave(stage.world)
    assert wishes == {"the last part/wanted": str(int(lacks))}
    assert begun[1:] == ([(CommitId(1, 4), 4, "the last part")] if lacks else [])


@pytest.mark.parametrize("through_data", [False, True])
def test_a_rank_that_has_no_part_of_the_last_commit_any_more_says_so_only_to_rank_0(
    stage: Stage, through_data: bool
) -> None:
    told: list[tuple[str, str]] = []
    checkpoints = SimpleNamespace(
        metric=None, restore=lambda device: None, is_due=lambda: False, wait=lambda is_over: None,
        expect_last_part=lambda *_: None,
        leave_out=lambda file, error, meeting: told.append((file, str(error))),
    )  # fmt: skip
    state = divided(stage, checkpoints)
    state.commit()
    stage.world.rank = 1
    with torch.no_grad():  # after the last commit, which may be durable
        for weight in state.model.parameters():
            (weight.data if through_data else weight).mul_(2.0)
    state._leave(stage.world)
    ((file, error),) = told
    assert file == "tensors-00002-of-00004.safetensors"
    assert "weights have changed since the last commit" in error


def test_a_durable_commit_that_all_ranks_write_is_not_asked_for_again(stage: Stage) -> None:
    calls: list[str] = []
    checkpoints = SimpleNamespace(
        metric=None, restore=lambda device: None, is_due=lambda: True,
        ask=lambda: calls.append("ask"), begin_part=lambda *_: calls.append("part"),
    )  # fmt: skip
    state = divided(stage, checkpoints)
    for durable in (False, False, True):  # rank 0 asks, all agree, and the third is written
        state.commit(durable=durable)
    assert calls == ["ask", "part"], "the write takes the request with it"


def test_a_commit_that_all_ranks_write_is_scored_once_its_write_has_begun(stage: Stage) -> None:
    calls: list[str] = []
    stage.checkpoints = SimpleNamespace(
        metric=Metric("loss", "min"), restore=lambda device: None, is_due=lambda: True,
        begin_part=lambda *_: calls.append("part"), score=lambda *_: calls.append("score"),
    )  # fmt: skip
    model = torch.nn.Linear(8, 8)
    state = TorchState(model, torch.optim.SGD(model.parameters()), commit="sharded")
    stage.begin(state, others=[None] * (SIZE - 1))
    checks: Any = SimpleNamespace(steps=1, before_commit=lambda: None, inputs_compared=lambda seen: None)
    state._checks = checks
    for _ in range(2):  # rank 0 asks, and all agree
        state.commit()
    checks.steps = 2
    state.report(loss=0.5)  # of what the next commit holds
    assert calls == []
    state.commit()
    assert calls == ["part", "score"], "or the same commit would be written twice"


def test_a_part_has_what_this_rank_writes_and_stays_as_it_was_committed(stage: Stage) -> None:
    state = divided(stage, None)
    state.commit()
    part = kept(state).part(stage.world, state._shared_values())
    encoded = encode_part(part)
    before = {name: tensor.clone() for name, tensor in encoded.tensors.items()}
    numbers = {int(name.split(".")[2]) for name in before if name.startswith("optimizer.state")}
    assert numbers == {number for number, _ in encoded.dicts[0]}
    assert 0 < len(numbers) < len(list(state.model.parameters()))
    weights = [name for name in encoded.awaited | before.keys() if name.startswith("model.")]
    assert 0 < len(encoded.awaited.intersection(weights)) < len(weights)
    for _ in range(2):
        for tensor in (*state.model.parameters(), *(entry["exp_avg"] for entry in state.optimizer.state.values())):
            tensor.detach().add_(1.0)
        state.commit()
    assert all(torch.equal(encoded.tensors[name], tensor) for name, tensor in before.items())


def test_in_a_fixed_world_nothing_is_divided_so_each_rank_has_the_whole_to_save_by_itself(stage: Stage) -> None:
    stage.is_fixed, stage.checkpoints = (
        True,
        SimpleNamespace(metric=object(), restore=lambda device: None, is_due=lambda: False),
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    state = TorchState(model, divisible(model.parameters()), commit="sharded")
    state._prepare()
    stage.begin(state, others=[None] * (SIZE - 1))
    state._checks = None
    train(state)
    moments = [entry["exp_avg"] for entry in state.optimizer.state_dict()["state"].values()]
    assert len(moments) == 4
    lent = state._lend().lend().content()["objects"]["optimizer"].content["state"]
    assert equal([entry["exp_avg"] for entry in lent.values()], moments)


@pytest.mark.parametrize(
    ("commit", "redundancy", "message"),
    [
        ("copy", 2, 'redundancy=2 is for commit="sharded"'),
        ("sharded", 3, "1 or 2, not 3"),
        ("sharded", 0, "a whole number from 1 on, not 0"),
    ],
)
def test_a_redundancy_that_does_not_fit_is_refused(commit: str, redundancy: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchState(commit=commit, redundancy=redundancy)


def test_outside_a_job_a_state_goes_back_to_its_last_commit() -> None:
    state = trained(commit="sharded")
    state.commit()
    committed = values(state)
    step(state)
    state.restore()
    assert equal(values(state), committed)


def test_neighbours_in_the_ring_are_on_different_hosts() -> None:
    """Two hosts of two ranks: 0 and 1, 2 and 3."""
    members = [Member(rank, rank, rank % 2, 2, rank // 2, 2, None) for rank in range(4)]
    assert [place_in_ring(members, rank) for rank in range(4)] == [0, 2, 1, 3]
