"""A ShardedState as one rank sees it: what it takes and refuses, and what is made anew after a loss."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_rank_sharded import held_again, made, step_lr, train, values
from torch import nn
from worker_stage import Stage

from spark_elastic import DistributedDataParallel, ShardedState, elastic
from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import CheckpointError, NotInWorldError, SparkElasticError, TrainingCodeError
from spark_elastic.worker.checks.same_inputs import same_inputs


def test_after_a_loss_everything_is_made_anew_as_of_the_last_commit(stage: Stage, begun: ShardedState) -> None:
    committed, model = values(begun), begun.model
    train(begun)
    held_again(stage, begun)
    assert begun.model is not model
    assert all(map(torch.equal, values(begun), committed))
    assert (begun.steps, begun.optimizer.param_groups[0]["lr"]) == (1, pytest.approx(0.01))
    train(begun)
    assert begun.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_what_was_set_to_another_object_since_goes_back_to_its_own(stage: Stage, begun: ShardedState) -> None:
    stages = [{"rate": 1.0}, {"rate": 2.0}]
    begun.stage, begun.config = stages[0], {"stage": stages[0]}
    train(begun)
    begun.commit()
    begun.stage = begun.config["stage"] = stages[1]
    held_again(stage, begun)
    assert begun.stage is begun.config["stage"] is stages[0]
    assert stages == [{"rate": 1.0}, {"rate": 2.0}]


def test_torchs_caches_do_not_keep_the_process_group_of_a_generation_that_has_ended(begun: ShardedState) -> None:
    nn.utils.clip_grad_norm_(begun.model.parameters(), 1.0)
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    begun.restore()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert group() is None


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"build": nn.Linear(1, 1)}, "build must be a function, which is called in each generation, not Linear"),
        ({"shard": None}, "shard must be a function"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "optimizer must be a function, .* not SGD"),
        ({"scheduler": "cosine"}, "scheduler must be a function"),
        ({"commit": "sharded"}, "a ShardedState has no commit="),
        ({"model": nn.Linear(1, 1)}, "a ShardedState has no model=: give build="),
        ({"teacher": [nn.Linear(1, 1)]}, r"teacher\[0\] is a Linear, of which each rank would keep the whole"),
        ({"other": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "other is a SGD, of which each rank"),
        ({"weight": torch.ones(1, device="meta")}, "weight is a tensor without data"),
        ({"loader": 3}, "loader must have a position"),
    ],
)
def test_arguments_that_cannot_work_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        made(**given)


def test_a_redundancy_that_is_neither_1_nor_2_is_refused() -> None:
    with pytest.raises(ValueError, match="redundancy"):
        made(redundancy=3)


def test_outside_a_job_it_says_how_to_have_one() -> None:
    with pytest.raises(
        SparkElasticError, match=r"a ShardedState needs a job.*call the function with spark_elastic\.run"
    ):
        elastic(lambda state: None)(made())


@pytest.mark.parametrize(
    ("attribute", "value", "error", "words"),
    [
        ("is_fixed", True, SparkElasticError, "leave elastic=False out"),
        (
            "checkpoints",
            object(),
            CheckpointError,
            r"leave checkpoint= out, and call torch\.distributed\.checkpoint\.save",
        ),
    ],
)
def test_jobs_that_it_does_not_go_with_are_refused(
    stage: Stage, attribute: str, value: object, error: type[Exception], words: str
) -> None:
    setattr(stage, attribute, value)
    with pytest.raises(error, match=words):
        stage.begin(made())


def test_a_wrapped_model_and_a_loader_with_shards_are_refused(stage: Stage) -> None:
    stage.models = [DistributedDataParallel(nn.Linear(1, 1))]
    with pytest.raises(SparkElasticError, match="do not go together"):
        stage.begin(made())
    stage.models = []
    loader = SimpleNamespace(state_dict=dict, load_state_dict=dict, shards=4, batch_rows=[1], set_world=lambda *_: None)
    with pytest.raises(SparkElasticError, match="a loader with shards=4 does not go with a ShardedState"):
        stage.begin(made(loader=loader))


def test_the_model_is_there_inside_the_elastic_function_only(stage: Stage, begun: ShardedState) -> None:
    with pytest.raises(NotInWorldError, match="made when the elastic function is entered"):
        made().model  # noqa: B018
    with pytest.raises(SparkElasticError, match="a rank cannot do so alone"):
        begun._enter(begun.restore)


def test_an_optimizer_of_ones_own_is_refused_at_its_first_step(begun: ShardedState) -> None:
    other = torch.optim.SGD(begun.model.parameters(), lr=0.1)
    with pytest.raises(TrainingCodeError, match=r"\(SGD\) steps that is not the one.*Write state\.optimizer\.step"):
        other.step()


def test_a_norm_of_divided_gradients_is_kept_as_a_number(begun: ShardedState) -> None:
    norm = nn.utils.clip_grad_norm_(begun.model.parameters(), 1.0)
    begun.norm = norm
    with pytest.raises(TypeError, match=r"float\(norm\)"):
        begun.commit()
    begun.norm = float(norm)
    begun.commit()


def test_each_rank_may_train_what_is_its_own(stage: Stage) -> None:
    probe = nn.Linear(1, 1)
    state = made(local={"probe": probe, "inner": torch.optim.SGD(probe.parameters(), lr=0.1)})
    stage.begin(state)
    state.inner.step()


def test_a_scaler_outside_the_state_is_refused_and_one_in_it_is_part_of_a_commit(stage: Stage) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def scaled(state: ShardedState) -> None:
        scaler.scale(state.model(torch.ones(1, 3)).sum()).backward()
        scaler.step(state.optimizer)

    state = made()
    stage.begin(state)
    with pytest.raises(
        TrainingCodeError, match=r"a GradScaler steps.*Write state = se\.ShardedState\(…, scaler=scaler\)"
    ):
        scaled(state)
    state._checks.end()  # type: ignore[union-attr]
    stage.control.commit = None
    state = made(scaler=scaler)
    stage.begin(state)
    scaled(state)


def test_a_scheduler_that_the_state_does_not_make_is_warned_of(stage: Stage) -> None:
    state = made()
    stage.begin(state)
    schedule = step_lr(state.optimizer)
    with pytest.warns(UserWarning, match=r"Write state = se\.ShardedState\(…, scheduler=scheduler\)"):
        train(state)
    assert schedule.optimizer is state.optimizer


class Counting(nn.Linear):
    """Counts its calls in an attribute, or in its extra state."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class CountingInItsState(Counting):
    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_a_count_in_an_attribute_of_the_model_is_warned_of(stage: Stage) -> None:
    stage.begin(state := made(build=lambda: Counting(3, 2), steps=0))
    for _ in range(4):
        train(state)
    with pytest.warns(UserWarning, match=r"attribute state\.model\.calls changes while it trains.*register_buffer"):
        train(state)


def test_a_count_that_is_extra_state_of_the_model_is_part_of_a_commit(stage: Stage) -> None:
    stage.begin(state := made(build=lambda: CountingInItsState(3, 2), steps=0))
    for _ in range(5):
        train(state)
    state.commit()
    held_again(stage, state)
    assert state.model.calls == 5


def test_a_commit_of_gradients_that_no_step_has_used_is_refused(begun: ShardedState) -> None:
    begun.optimizer.zero_grad()
    begun.model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(TrainingCodeError, match=r"a commit came after backward\(\) and before optimizer\.step\(\)"):
        begun.commit()
    begun.optimizer.step()
    begun.commit()


@pytest.mark.parametrize("has_loader", [False, True])
def test_ranks_compare_what_the_model_is_given_unless_a_loader_of_the_state_delivers_it(
    stage: Stage, has_loader: bool
) -> None:
    state = made(loader=ElasticDataLoader(range(8), global_batch_size=4) if has_loader else None)
    stage.begin(state)
    same_inputs.start()
    with torch.no_grad():
        state.model(torch.ones(1, 3))
    assert same_inputs.report() == 0
    state.model(torch.ones(1, 3))
    assert (same_inputs.report() == 0) == has_loader
