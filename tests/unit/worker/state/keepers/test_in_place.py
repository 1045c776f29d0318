"""Commits in place: nothing large is copied, and whoever is caught between step and commit says that it holds nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from worker_stage import Stage, on_stage

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.errors import SparkElasticError, StateLostError, WorkerLostError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.ddp import DistributedDataParallel
from spark_elastic.worker.state.keepers.in_place import InPlace
from spark_elastic.worker.state.objects import ObjectState
from spark_elastic.worker.state.torch_state import TorchState


def make() -> TorchState:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.BatchNorm1d(50)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return TorchState(model=model, optimizer=optimizer, epoch=0, commit="in_place")


def backward(state: TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.randn(4, 50)).square().sum().backward()


def step(state: TorchState) -> None:
    backward(state)
    state.optimizer.step()


def weights(state: TorchState) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in state.model.parameters()])


def means(state: TorchState) -> torch.Tensor:
    return state.model.module[1].running_mean.clone()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage() as stage:
        yield stage


def test_a_commit_copies_buffers_and_settings_but_neither_weights_nor_moments() -> None:
    state = make()
    for _ in range(3):
        step(state)
        state.commit()
    copied = state._keeper.current.buffer.views
    assert sum(tensor.numel() for tensor in copied) < 200
    assert weights(state).numel() > 2500


def test_ahead_of_the_step_everything_goes_back_to_the_last_commit() -> None:
    state = make()
    step(state)
    state.commit()
    held, seen = weights(state), means(state)
    state.optimizer.param_groups[0]["lr"] = 7.0
    state.epoch = 5
    backward(state)
    assert not torch.equal(means(state), seen)
    state.restore()
    assert torch.equal(weights(state), held)
    assert torch.equal(means(state), seen)
    assert (state.epoch, state.optimizer.param_groups[0]["lr"]) == (0, 0.1)
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_a_second_step_without_a_commit_between_is_refused() -> None:
    state = make()
    state._begin(None)
    step(state)
    with pytest.raises(SparkElasticError, match="exactly one optimizer step"):
        step(state)


def test_outside_a_job_there_is_no_way_back_once_the_step_is_made() -> None:
    state = make()
    state._begin(None)
    state.commit()
    step(state)
    with pytest.raises(SparkElasticError, match="keeps no copy"):
        state.restore()


def test_a_function_that_wants_to_go_back_once_the_step_is_made_is_told_that_there_is_no_way(stage: Stage) -> None:
    state = make()
    stage.begin(state)
    step(state)
    with pytest.raises(SparkElasticError, match="keeps no copy to restore once the optimizer has stepped"):
        state._enter(state.restore)
    state.restore()  # as elastic does it, ahead of a sync
    assert stage.control.commit is None


def test_in_a_broken_world_no_step_is_made(stage: Stage) -> None:
    state = make()
    stage.begin(state)
    backward(state)
    held = weights(state)
    stage.broken = True
    with pytest.raises(WorkerLostError):
        state.optimizer.step()
    assert torch.equal(weights(state), held)
    state.restore()
    assert stage.control.commit == CommitId(1, 0)


def test_a_world_that_breaks_after_the_step_does_not_keep_it_from_being_committed(stage: Stage) -> None:
    state = make()
    stage.begin(state)
    step(state)
    stage.broken = True
    held = weights(state)
    state.commit()
    assert stage.control.commit == CommitId(1, 1)
    state.restore()
    assert torch.equal(weights(state), held)


def caught(stage: Stage) -> tuple[TorchState, TorchState]:
    """A state whose rank was caught between step and commit, and the one that is about to arrive."""
    other = make()
    stage.models.clear()
    state = make()
    stage.begin(state)
    step(state)
    state.commit()
    step(other)
    step(state)
    state.restore()
    assert stage.control.commit is None
    objects = {name: StateDict(getattr(other, name).state_dict()) for name in ("model", "optimizer")}
    stage.arriving = {"steps": 9, "size": 2, "objects": {**objects, "epoch": 3}}
    return state, other


def test_who_is_caught_between_step_and_commit_holds_nothing_until_the_state_arrives(stage: Stage) -> None:
    state, other = caught(stage)
    stage.begin(state, rank=1, others=[CommitId(1, 1)])
    assert torch.equal(weights(state), weights(other))
    assert state.epoch == 3
    backward(state)
    state.restore()
    assert torch.equal(weights(state), weights(other))
    assert torch.equal(means(state), means(other))


def test_what_has_arrived_is_held_also_if_the_next_loss_comes_before_the_seal(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, other = caught(stage)
    monkeypatch.setattr(stage, "attach_models", _lose)
    with pytest.raises(WorkerLostError):
        stage.begin(state, rank=1, others=[CommitId(1, 1)])
    state.restore()
    assert stage.control.commit == CommitId(1, 1)
    assert state.epoch == 3
    assert torch.equal(weights(state), weights(other))
    assert torch.equal(means(state), means(other))


def _lose() -> None:
    raise WorkerLostError("a rank was lost before the seal")


def test_a_donor_copies_the_whole_state_for_those_that_lack_it(stage: Stage) -> None:
    state = make()
    stage.begin(state)
    step(state)
    state.commit()
    stage.begin(state, others=[None])
    copies = state._keeper.for_repair(state._values(shared=True), is_sender=True)
    sent = copies.current.content()["objects"]
    assert sorted(sent) == ["epoch", "model", "optimizer"]
    assert torch.equal(sent["model"].content["module.0.weight"], state.model.module[0].weight)
    assert sent["optimizer"].content["state"][0]["exp_avg"].shape == (50, 50)
    assert sorted(ObjectState._values(state, shared=True)) == sorted(sent)


def test_all_caught_between_step_and_commit_is_no_first_state(stage: Stage) -> None:
    """With durable checkpoints a job then starts over; if none is written yet, these weights must not pass for a first state."""
    state = make()
    stage.begin(state)
    step(state)
    state.restore()
    with pytest.raises(StateLostError):
        stage.begin(state)


def test_a_durable_checkpoint_is_made_of_a_copy_that_later_steps_do_not_touch(stage: Stage) -> None:
    state = make()
    stage.begin(state)
    step(state)
    state.commit()
    held = weights(state)
    lent = state._lend().lend()
    step(state)
    content = lent.content()
    assert torch.equal(content["objects"]["model"].content["module.0.weight"].flatten(), held[:2500])
    assert (content["steps"], content["size"]) == (1, 1)


def test_leaving_the_function_after_a_step_without_a_commit_is_refused(stage: Stage) -> None:
    state = make()
    stage.begin(state)
    step(state)
    with pytest.raises(SparkElasticError, match="without a commit"):
        state._leave(stage.world)


def test_an_optimizer_in_two_places_steps_once() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = ObjectState(optimizer=optimizer, all=[optimizer])
    state._keeper = state._commits.keeper = InPlace()
    state._begin(None)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() < 1


def test_who_trains_on_alone_once_the_job_has_finished_needs_no_commits(stage: Stage) -> None:
    """The second step was refused, and the first one after an interrupt that code had swallowed just before it returned."""
    state = make()
    stage.begin(state)
    step(state)
    state.commit()
    state._keeper.keep_live()
    stage.finished = True
    state.model.detach()
    before = weights(state)
    for _ in range(2):
        step(state)
    assert not torch.equal(weights(state), before)
