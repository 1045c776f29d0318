"""Commits in place: nothing large is copied, and whoever is caught between step and commit says that it holds nothing."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer
from worker_stage import Stage, on_stage

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.errors import SparkElasticError, StateLostError, TrainingCodeError, WorkerLostError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.state.keepers.in_place import InPlace, _guards
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
    with pytest.raises(TrainingCodeError, match="exactly one optimizer step"):
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


@pytest.mark.parametrize("parts", [slice(None), slice(0, 1)], ids=["all weights", "some"])
def test_the_first_step_of_an_optimizer_that_was_made_since_the_last_commit_counts(stage: Stage, parts: slice) -> None:
    """Ranks that had made it took their weights for those of the last commit, and the next generation trained on both."""
    state = make()
    stage.begin(state)
    step(state)
    state.commit()
    made = torch.optim.SGD(list(state.model.parameters())[parts], lr=0.1)
    state.optimizer = made
    backward(state)
    held = weights(state)
    stage.broken = True
    with pytest.raises(WorkerLostError):
        made.step()
    assert torch.equal(weights(state), held)
    assert state._commits.can_restore()
    stage.broken = False
    made.step()
    assert not state._commits.can_restore()
    stage.broken = True
    state.commit()
    assert stage.control.commit == CommitId(1, 2)


def test_optimizers_of_other_weights_are_none_of_its_business(stage: Stage) -> None:
    state = make()
    stage.begin(state)
    other = torch.nn.Linear(1, 1)
    other(torch.ones(1, 1)).sum().backward()
    stage.broken = True
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert state._commits.can_restore()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_first_step_of_weights_that_have_been_frozen_counts_also_by_an_optimizer_of_their_own(
    stage: Stage, kind: type[torch.optim.Optimizer]
) -> None:
    """Of an embedding, a step changes only the rows that were looked up, which a look at some of its values misses."""
    embedding, head = torch.nn.Embedding(1000, 16), torch.nn.Linear(16, 1)
    model = DistributedDataParallel(torch.nn.Sequential(embedding, head))
    state = TorchState(model=model, optimizer=torch.optim.SGD(head.parameters(), lr=0.1), commit="in_place")
    stage.begin(state)
    state.commit()
    state.thawed = kind(embedding.parameters(), lr=0.1)
    model(torch.tensor([3, 7])).sum().backward()
    held = embedding.weight.clone()
    stage.broken = True
    with pytest.raises(WorkerLostError):
        state.thawed.step()
    assert torch.equal(embedding.weight, held)
    stage.broken = False
    state.thawed.step()
    assert not torch.equal(embedding.weight, held)
    assert not state._commits.can_restore()


class Holder:
    """Has an optimizer of which a State sees no more than a state dict."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the optimizer's."""
        self.optimizer.load_state_dict(state)


def test_optimizers_that_objects_of_the_users_hold_step_beside_the_one_of_the_state(stage: Stage) -> None:
    one, other = (DistributedDataParallel(torch.nn.Linear(1, 1)) for _ in range(2))
    held = Holder(torch.optim.SGD(other.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    state = TorchState(model=one, other=other, optimizer=optimizer, held=held, commit="in_place")
    stage.begin(state)
    for step in range(4):
        (one(torch.ones(1, 1)) + other(torch.ones(1, 1))).sum().backward()
        held.optimizer.step()
        assert state._commits.can_restore() == (step > 0), (
            "once they are known to change, a commit copies these weights"
        )
        optimizer.step()
        assert not state._commits.can_restore()
        state.commit()


def test_an_optimizer_that_is_given_weights_that_do_not_train_changes_none(stage: Stage) -> None:
    """A rank that was lost after its step then had all others hold no commit."""
    model, frozen = DistributedDataParallel(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1).requires_grad_(False)
    held = Holder(torch.optim.SGD(frozen.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model=model, frozen=frozen, optimizer=optimizer, held=held, commit="in_place")
    stage.begin(state)
    held.optimizer.step()
    assert state._commits.can_restore()


def test_an_optimizer_that_is_set_up_anew_is_watched_on(stage: Stage) -> None:
    """Its hooks are gone then."""
    state = make()
    stage.begin(state)
    for _ in range(2):
        state.optimizer.__init__(state.model.parameters(), lr=0.01)
        step(state)
        assert not state._commits.can_restore()
        state.commit()


class Careful(torch.optim.Adam):
    """Calls its base class's step, for which torch calls the hooks again once an Adam has been made."""

    def step(self, closure: Any = None) -> Any:
        """Step."""
        return super().step(closure)


def test_the_step_of_a_subclass_that_calls_its_base_class_is_one_step(stage: Stage) -> None:
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    state = make()
    state.optimizer = Careful(state.model.parameters(), lr=0.1)
    stage.begin(state)
    for _ in range(2):
        step(state)
        state.commit()
    step(state)
    with pytest.raises(TrainingCodeError, match="exactly one optimizer step"):
        step(state)


def test_a_state_that_is_gone_watches_no_optimizers_and_may_be_freed_within_a_step() -> None:
    """Each State had a hook of its own, and freeing it while torch called the hooks ended the step of another."""
    gc.collect()
    before = set(_guards)
    gone, state = make(), make()
    gone._begin(None)
    state._begin(None)
    assert len(_guards) == len(before) + 2
    del gone
    hook = optimizer.register_optimizer_step_pre_hook(lambda *_: gc.collect() and None)
    optimizer._global_optimizer_pre_hooks.move_to_end(hook.id, last=False)
    try:
        step(state)
    finally:
        hook.remove()
    assert set(_guards) - before == {state._keeper.guard}


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


class Counting(torch.nn.Linear):
    """Counts its calls, in an attribute that only its extra state holds, and in one that a hook adds to the state dict."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.seen = 0, [0]
        self.register_state_dict_post_hook(_add_seen)
        self.register_load_state_dict_pre_hook(_take_seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count the call."""
        self.calls += 1
        self.seen[0] += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        """Return the calls."""
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Set the calls."""
        self.calls = state["calls"]


def _add_seen(module: Any, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    state_dict[f"{prefix}seen"] = torch.tensor(module.seen)


def _take_seen(module: Any, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    module.seen = state_dict.pop(f"{prefix}seen").tolist()


@pytest.mark.parametrize("commits", [1, 3])
def test_what_a_state_dict_has_besides_tensors_goes_back_to_the_last_commit(commits: int) -> None:
    model = torch.nn.Sequential(Counting(), torch.nn.Linear(2, 1))
    state = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), commit="in_place")
    for _ in range(commits):
        model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.commit()
    kept = model[0].weight.clone()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        assert model[0].calls == commits + 1
        state.restore()
        assert (model[0].calls, model[0].seen) == (commits, [commits])
    assert torch.equal(model[0].weight, kept)


def averaging(frozen: bool = False) -> tuple[TorchState, torch.nn.Module]:
    """A state whose average user code changes, and the average."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 3)
    average = copy.deepcopy(model).requires_grad_(not frozen)
    return TorchState(
        model=model, average=average, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), commit="in_place"
    ), average


def in_place(average: torch.nn.Module) -> None:
    with torch.no_grad():
        average.weight.mul_(0.5)


def through_data(average: torch.nn.Module) -> None:
    average.weight.data = average.weight.data * 0.5


@pytest.mark.parametrize("change", [in_place, through_data])
@pytest.mark.parametrize("frozen", [True, False])
def test_weights_that_change_without_an_optimizer_go_back_to_the_last_commit(
    frozen: bool, change: Callable[[torch.nn.Module], None], stage: Stage
) -> None:
    state, average = averaging(frozen)
    stage.begin(state)
    assert not state._keeper.current.skeleton["objects"]["average"].weights, "nothing has changed yet"
    for _ in range(2):
        change(average)
        state.commit()
    held = average.weight.clone()
    change(average)
    assert not torch.equal(average.weight, held)
    state.restore()
    assert torch.equal(average.weight, held)
    assert stage.control.commit == CommitId(1, 2)
    assert not state._keeper.current.skeleton["objects"]["model"].weights


@pytest.mark.parametrize("change", [in_place, through_data])
def test_weights_that_change_for_the_first_time_are_missed_and_not_taken_for_those_of_the_commit(
    change: Callable[[torch.nn.Module], None], stage: Stage
) -> None:
    state, average = averaging()
    stage.begin(state)
    state.commit()
    change(average)
    assert not state._commits.can_restore()
    state.restore()
    assert stage.control.commit is None
    with pytest.raises(StateLostError, match="a weight of a Linear, such as weight, was changed without an optimizer"):
        stage.begin(state)


def test_layers_that_begin_to_train_are_no_weights_that_change_without_an_optimizer(stage: Stage) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[:2].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    wrapped = DistributedDataParallel(model)
    state = TorchState(model=wrapped, optimizer=optimizer, commit="in_place")
    stage.begin(state)
    for layer in (None, model[1], None):
        if layer is not None:
            optimizer.add_param_group({"params": list(layer.requires_grad_(True).parameters())})
            assert state._commits.can_restore()
        optimizer.zero_grad()
        wrapped(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.commit()
        assert not state._keeper.current.skeleton["objects"]["model"].weights
    through_data(model[0])
    assert not state._commits.can_restore()


def test_weights_that_change_after_the_last_commit_keep_no_function_from_returning(stage: Stage) -> None:
    state, average = averaging()
    stage.begin(state)
    state.commit()
    in_place(average)
    state._leave(stage.world)


def test_in_a_broken_world_no_commit_follows_an_average_that_was_changed_ahead_of_the_step(stage: Stage) -> None:
    state, average = averaging()
    stage.begin(state)
    in_place(average)
    stage.broken = True
    with pytest.raises(WorkerLostError):
        state.commit()


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


def by_closure(state: TorchState, fails: bool = False) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        state.optimizer.zero_grad()
        loss: torch.Tensor = state.model(torch.randn(4, 50)).square().sum()
        if fails:
            raise WorkerLostError("a reduction has failed")
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("named", [False, True])
def test_a_loss_in_a_closure_comes_before_the_step_of_an_optimizer_of_torchs(stage: Stage, named: bool) -> None:
    state = make()
    stage.begin(state)
    for _ in range(2):
        assert state.optimizer.step(by_closure(state)).dim() == 0
        assert state._keeper.has_stepped
        state.commit()
    held, failing = weights(state), by_closure(state, fails=True)
    with pytest.raises(WorkerLostError, match="a reduction has failed"):
        state.optimizer.step(closure=failing) if named else state.optimizer.step(failing)
    assert state._keeper.can_go_back()
    state.restore()
    assert torch.equal(weights(state), held)


def test_a_world_that_breaks_in_a_closure_ends_the_step_before_it_changes_anything(stage: Stage) -> None:
    state = make()
    stage.begin(state)
    step(state)
    state.commit()
    held = weights(state)

    def closure() -> torch.Tensor:
        loss = by_closure(state)()
        stage.broken = True
        return loss

    with pytest.raises(WorkerLostError, match="is broken"):
        state.optimizer.step(closure)
    assert not state._keeper.has_stepped
    assert torch.equal(weights(state), held)


class Ascending(torch.optim.SGD):
    """Moves the weights before it calls the closure, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(1.0)
        return super().step(closure)


def test_another_optimizer_may_change_weights_before_it_calls_its_closure(stage: Stage) -> None:
    state = make()
    state.optimizer = Ascending(state.model.parameters(), lr=0.1)
    stage.begin(state)
    state.commit()
    with pytest.raises(WorkerLostError):
        state.optimizer.step(by_closure(state, fails=True))
    assert not state._keeper.can_go_back()


def test_what_a_scaler_has_left_on_an_optimizer_whose_step_did_not_begin_does_not_count_again() -> None:
    state = make()
    step(state)
    state.commit()
    state.optimizer.grad_scale, state.optimizer.found_inf = torch.tensor(64.0), torch.tensor(0.0)
    state.restore()
    assert not {"grad_scale", "found_inf"} & vars(state.optimizer).keys()
