"""States: save and restore by value, commits that are counted and named, interrupts at the same commit on all ranks."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from worker_stage import on_stage

from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import HostsUpdatedInterrupt, SparkElasticError, WorkerLostError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.elastic import elastic
from spark_elastic.worker.state.base import ObjectState, State
from spark_elastic.worker.state.torch_state import TorchState


def trained(steps: int = 2, commit: str = "copy") -> TorchState:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    state = TorchState(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1), epoch=0, commit=commit)
    for _ in range(steps):
        step(state)
    return state


def step(state: TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 3)).sum().backward()
    state.optimizer.step()


def values(state: TorchState) -> list[torch.Tensor]:
    parameters = list(state.model.parameters())
    moments = [state.optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    return [tensor.detach().clone() for tensor in [*parameters, *moments]]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# ---------------------------------------------------------------- outside a job


def test_objects_are_attributes_and_go_back_to_the_last_commit() -> None:
    state = ObjectState(epoch=0, log=[])
    state.commit()
    state.epoch, state.new = 5, "x"
    state.log.append(1)
    state.restore()
    assert (state.epoch, state.log) == (0, [])


def test_attributes_that_are_set_later_belong_to_the_state() -> None:
    state = ObjectState()
    state.best = 3
    state.commit()
    state.best = 4
    state.restore()
    assert state.best == 3


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


def test_outside_a_job_entering_the_function_is_something_to_go_back_to() -> None:
    @elastic
    def train(state: ObjectState) -> int:
        state.epoch += 1
        state.restore()
        return state.epoch

    state = ObjectState(epoch=0)
    state.epoch = 5
    assert train(state) == 5


def test_in_a_job_a_restore_ahead_of_the_first_generation_does_nothing() -> None:
    with on_stage():
        state = ObjectState(epoch=7)
        state.epoch = 8
        state.restore()
        assert state.epoch == 8


def test_a_restore_can_be_repeated() -> None:
    state = ObjectState(log=[1])
    state.commit()
    for _ in range(2):
        state.log.append(2)
        state.restore()
        assert state.log == [1]


@pytest.mark.parametrize("name", ["commit", "save", "donor", "_private"])
def test_names_that_are_taken_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ObjectState(**{name: 1})


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


def test_local_objects_are_saved_and_restored_on_their_rank() -> None:
    state = ObjectState(epoch=0, local={"seen": 1})
    state.commit()
    state.seen = 2
    state.restore()
    assert state.seen == 1


def test_local_objects_are_never_part_of_what_travels() -> None:
    state = ObjectState(epoch=0, seen=1, local="seen")
    state.commit()
    assert state._snapshots.current.content()["objects"] == {"epoch": 0}


def test_a_commit_that_cannot_be_copied_leaves_the_one_before() -> None:
    state = ObjectState(epoch=0, thing=1)
    state.commit()
    state.epoch, state.thing = 1, (entry for entry in ())
    with pytest.raises(TypeError):
        state.commit()
    state.thing = None
    state.restore()
    assert (state.epoch, state.thing) == (0, 1)


def test_an_unknown_kind_of_commit_is_refused() -> None:
    with pytest.raises(ValueError, match="commit"):
        TorchState(commit="other")


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler", "loader"])
def test_an_object_that_cannot_play_its_part_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must .* int"):
        TorchState(**{name: 3})


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="elastic takes a function, not 3"):
        elastic(3)
    with pytest.raises(TypeError, match="callbacks must be callable, not 3"):
        ObjectState().register_reset_callbacks([print, 3])


def test_an_elastic_function_is_simply_called_outside_a_job() -> None:
    @elastic
    def train(state: ObjectState, add: int, *, times: int = 1) -> int:
        state.epoch += add * times
        state.commit()
        state.check_host_updates()
        state.heartbeat()
        state.report(loss=1.0)
        return state.epoch

    assert train(ObjectState(epoch=1), 2, times=3) == 7
    assert train.__name__ == "train"


def test_the_first_argument_of_an_elastic_function_is_a_state() -> None:
    with pytest.raises(TypeError, match="is a State, not dict"):
        elastic(lambda state: None)({})


# ---------------------------------------------------------------- in a staged job


def test_commits_are_named_by_generation_and_index() -> None:
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        assert stage.control.commit == CommitId(1, 0)
        state.commit()
        state.commit()
        assert stage.control.commit == CommitId(1, 2)
        stage.begin(state)
        assert stage.control.commit == CommitId(2, 0)


def test_a_commit_in_a_broken_world_is_not_saved() -> None:
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        state.epoch, stage.broken = 1, True
        with pytest.raises(WorkerLostError):
            state.commit()
        assert stage.control.commit == CommitId(1, 0)
        state.restore()
        assert state.epoch == 0


def test_an_interrupt_is_raised_one_commit_later_on_all_ranks_and_loses_nothing() -> None:
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        stage.control.is_interrupted = True
        state.commit()
        state.epoch = 2
        with pytest.raises(HostsUpdatedInterrupt):
            state.commit()
        state.epoch = 3
        state.restore()
        assert state.epoch == 2


def test_an_interrupt_that_only_another_rank_has_seen_is_raised_here_too() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state, others=[None])
        stage.peers = lambda mine: [mine, [1, *mine[1:]]]
        state.commit()
        with pytest.raises(HostsUpdatedInterrupt):
            state.commit()


def test_an_interrupt_that_was_swallowed_is_raised_again_at_the_next_commit() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state)
        stage.control.is_interrupted = True
        state.commit()
        for _ in range(4):
            with pytest.raises(HostsUpdatedInterrupt):
                state.commit()
            stage.control.is_interrupted = False


def test_check_host_updates_commits_only_if_it_interrupts() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state)
        state.check_host_updates()
        assert stage.control.commit == CommitId(1, 0)
        stage.control.is_interrupted = True
        state.check_host_updates()
        with pytest.raises(HostsUpdatedInterrupt):
            state.check_host_updates()
        assert stage.control.commit == CommitId(1, 1)


def test_ranks_that_commit_unequally_often_are_told() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state, others=[None])
        stage.peers = lambda mine: [mine, [mine[0], mine[1] - 1, *mine[2:]]]
        state.commit()
        with pytest.raises(SparkElasticError, match="equally often"):
            state.commit()


def test_reset_callbacks_run_at_every_generation_but_the_first() -> None:
    calls: list[tuple[int, int]] = []
    with on_stage() as stage:
        state = ObjectState()
        state.register_reset_callbacks([lambda old, new: calls.append((old, new))])
        stage.begin(state)
        stage.begin(state, others=[CommitId(1, 0)], previous_size=4)
    assert calls == [(4, 2)]


def test_a_state_of_the_users_own_is_counted_too() -> None:
    class Own(State):
        def save(self) -> None: ...

        def restore(self) -> None: ...

        def sync(self) -> None: ...

    with on_stage() as stage:
        state = Own()
        stage.begin(state)
        state.commit()
        assert stage.control.commit == CommitId(1, 1)
        assert state.donor == 0


def test_the_donor_is_a_rank_with_the_newest_commit() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state)
        stage.begin(state, others=[CommitId(1, 5)], rank=0)
        assert state.donor == 1


def test_reports_carry_plain_numbers_and_the_step() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state)
        state.commit()
        state.report(loss=torch.tensor(1.5), name="x", count=numpy.int64(3))
        assert stage.control.reported[-1] == ("metrics", {"step": 1, "loss": 1.5, "name": "x", "count": 3})
        with pytest.raises(TypeError, match="loss"):
            state.report(loss=[1])


def test_who_enters_a_generation_says_so_and_rank_0_tells_how_far_the_job_is() -> None:
    loader = SimpleNamespace(epoch=1, rows_processed=30, rows_total=100)
    for rank, told in ((0, ["entered", "progress", "stepped"]), (1, ["entered", "stepped"])):
        with on_stage() as stage:
            state = TorchState(loader=loader)
            stage.begin(state, rank=rank, others=[None])
            state.commit()
            assert [kind for kind, _ in stage.control.reported] == told
            progress = [values for kind, values in stage.control.reported if kind == "progress"]
            assert progress == [{"step": 0, "epoch": 1, "rows": 30, "rows_total": 100}] * (rank == 0)


# ---------------------------------------------------------------- found in review


def lose_a_peer(old: int, new: int) -> None:
    """A reset callback that reduces something, and meets a peer that dies."""
    raise WorkerLostError("a peer died")


def test_a_newcomer_survives_a_loss_between_its_repair_and_the_first_commit() -> None:
    with on_stage() as stage:
        state = TorchState(epoch=0)
        state.register_reset_callbacks([lose_a_peer])
        stage.arriving = {"steps": 4, "size": 1, "objects": {"epoch": 4}}
        with pytest.raises(WorkerLostError):
            stage.begin(state, rank=1, others=[CommitId(3, 4)])
        state.restore()
        assert state.epoch == 4


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


def test_the_step_does_not_grow_by_a_loss_before_the_first_commit_of_a_generation() -> None:
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        for _ in range(5):
            state.commit()
        for _ in range(3):
            stage.begin(state)
            state.restore()
        state.commit()
        state.report()
        assert stage.control.reported[-1][1]["step"] == 6


def test_an_attribute_that_was_set_after_the_last_commit_is_gone_after_a_restore() -> None:
    state = ObjectState(epoch=0)
    state.commit()
    state.cursor = 17
    state.restore()
    assert not hasattr(state, "cursor"), "the survivor has it, a newcomer repaired from it has not"


def test_a_repaired_rank_holds_the_newest_commit_before_its_seal() -> None:
    """A donor may die when only some receivers are done: who has the commit has to say so."""
    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        state.commit()
        state.register_reset_callbacks([lose_a_peer])
        stage.arriving = {"steps": 3, "size": 1, "objects": {"epoch": 3}}
        with pytest.raises(WorkerLostError):
            stage.begin(state, others=[CommitId(1, 3)])
        assert stage.control.commit == CommitId(1, 3)


def test_a_tensor_that_others_hold_is_restored_in_place() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state = TorchState(w=weight)
    state.commit()
    with torch.no_grad():
        weight.zero_()
    state.restore()
    assert state.w is weight
    assert weight.tolist() == [1.0, 1.0]


def test_a_second_state_cannot_commit_in_a_job() -> None:
    with on_stage() as stage:
        stage.begin(ObjectState(epoch=0))
        with pytest.raises(SparkElasticError, match="only the state that was given to the elastic function commits"):
            ObjectState(other=1).commit()


def test_reported_values_become_plain_numbers() -> None:
    import numpy

    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        state.report(better=True, loss=numpy.float64(0.5), count=torch.tensor(3), huge=2**70)
        values = stage.control.reported[-1][1]
        assert [type(values[name]) for name in ("better", "loss", "count", "huge")] == [int, float, int, float]


def test_an_object_that_gets_a_state_dict_after_the_commit_goes_back_to_what_it_was() -> None:
    state = ObjectState(ema=None)
    state.commit()
    state.ema = torch.nn.Linear(1, 1)
    state.restore()
    assert state.ema is None


@pytest.mark.parametrize("commit", ["copy", "in_place"])
def test_what_requires_gradients_is_part_of_a_commit_and_goes_to_newcomers(commit: str) -> None:
    def made() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        model[0].requires_grad_(False)
        return model

    state, newcomer = (TorchState(model=torch.compile(made(), backend="eager"), commit=commit) for _ in range(2))
    first, second = state.model._orig_mod
    first.requires_grad_(True)
    second.bias.requires_grad_(False)
    state.commit()
    state.model.requires_grad_(True)
    state.restore()
    whole = state._copy_whole() if commit == "in_place" else state._snapshots.current
    newcomer._load(whole.content()["objects"])
    for holder in (state, newcomer):
        names = [name for name, parameter in holder.model.named_parameters() if not parameter.requires_grad]
        assert names == ["_orig_mod.1.bias"]


def test_a_state_dict_of_the_users_own_freezes_nothing() -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    loaded = torch.nn.Linear(2, 2)
    loaded.load_state_dict(model.state_dict())
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_loaders_in_containers_take_their_ranks_share() -> None:
    loaders = [ElasticDataLoader(range(12), 2) for _ in range(3)]
    state = TorchState(loader=loaders[0], others={"labelled": loaders[1], "rest": [loaders[2]]})
    state._enter_world(1, 3)
    assert [len(loader) for loader in loaders] == [2, 2, 2]
