"""Resumed settings: which of the settings that a script gives are replaced by those of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.worker.checks.resumed_optimizers import describe_steppers
from spark_elastic.worker.checks.resumed_settings import PreparedGroups, dropped_objects, replaced_settings
from spark_elastic.worker.state.snapshot import find_objects


def make(make_scheduler: Any = None, **settings: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], **{"lr": 0.1, **settings})
    return {"optimizer": optimizer} | ({} if make_scheduler is None else {"scheduler": make_scheduler(optimizer)})


def saved(objects: dict[str, Any], steps: int = 3) -> dict[str, StateDict]:
    for _ in range(steps):
        for value in objects.values():
            value.step(1.0) if isinstance(value, lr_scheduler.ReduceLROnPlateau) else value.step()
    return {name: StateDict(value.state_dict()) for name, value in objects.items()}


@pytest.mark.parametrize(
    "make_scheduler",
    [
        None,
        lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
        ),
    ],
)
def test_what_training_itself_changes_is_no_difference(make_scheduler: Any) -> None:
    kept = saved(make(make_scheduler, momentum=0.9))
    assert replaced_settings(make(make_scheduler, momentum=0.9), kept) == []


def test_settings_that_differ_are_named_with_both_values() -> None:
    found = replaced_settings(make(lr=0.2, nesterov=True, momentum=0.9), saved(make(momentum=0.9)))
    assert sorted(found) == [
        "state.optimizer has lr=0.1 as saved, not 0.2 as given here",
        "state.optimizer has nesterov=False as saved, not True as given here",
    ]


def test_settings_of_optimizers_and_schedulers_in_containers_count_too() -> None:
    """Silently, the earlier ones stayed."""
    live, kept = make(lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), weight_decay=0.5), saved(make())
    kept |= saved({"scheduler": lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), 1, 0.1)})
    found = replaced_settings(
        {"all": [live["optimizer"]], "of": {"main": live["scheduler"]}},
        {"all": [kept["optimizer"]], "of": {"main": kept["scheduler"]}},
    )
    assert found == [
        "state.all[0] has weight_decay=0 as saved, not 0.5 as given here",
        "state.of['main'] has gamma=0.1 as saved, not 0.5 as given here",
    ]


def in_turn(milestone: int, gamma: float) -> Any:
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, gamma)], [milestone]
    )


@pytest.mark.parametrize(
    ("here", "before", "told"),
    [
        (in_turn(3, 0.9), in_turn(2, 0.9), ["milestones=[2] as saved, not [3]"]),
        (in_turn(2, 0.5), in_turn(2, 0.9), ["schedulers[1].gamma=0.9 as saved, not 0.5"]),
        (
            lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
            lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 50]),
            ["milestones=[2, 50] as saved, not [2, 5]"],
        ),
    ],
    ids=["milestones of a sequence", "a scheduler in it", "milestones"],
)
def test_milestones_and_the_settings_of_schedulers_in_others_count(here: Any, before: Any, told: list[str]) -> None:
    found = replaced_settings(make(here), saved(make(before)))
    assert found == [f"state.scheduler has {each} as given here" for each in told]


class Warming(lr_scheduler.LambdaLR):
    """A user's own, which keeps what it has seen, and has an attribute by the name of one of torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.previous, self._schedulers = None, None
        super().__init__(optimizer, Counting())

    def step(self, *_: Any) -> None:
        """Keep the rate."""
        super().step()
        self.previous = self.optimizer.param_groups[0]["lr"]


class Counting:
    """Is called with an epoch."""

    def __init__(self) -> None:
        self.calls, self.rates = 0, torch.ones(2)

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        self.rates[epoch % 2] = 0.5
        return 0.5


def test_what_schedulers_of_the_users_own_have_kept_is_no_difference() -> None:
    kept = saved(make(Warming))
    live = make(Warming)
    assert replaced_settings(live, kept) == []
    assert replaced_settings({**live, "again": live["scheduler"]}, {**kept, "again": kept["scheduler"]}) == []
    assert describe_steppers(find_objects(live))["scheduler"]["parts"] == []


def test_a_setting_that_is_none_counts_and_a_tensors_precision_does_not() -> None:
    live, before = make(lr=torch.tensor(0.1)), make(lr=0.1)
    live["optimizer"].param_groups[0]["adjust"], before["optimizer"].param_groups[0]["adjust"] = "to rms", None
    assert replaced_settings(live, saved(before)) == [
        "state.optimizer has adjust=None as saved, not 'to rms' as given here"
    ]


def test_a_learning_rate_that_is_a_tensor_is_named_as_a_number() -> None:
    kept = saved(make(lr=torch.tensor(0.5)))
    (told,) = replaced_settings(make(lr=torch.tensor(0.25)), kept)
    assert told == "state.optimizer has lr=0.5 as saved, not 0.25 as given here"


def test_with_a_scheduler_its_own_settings_and_the_first_learning_rate_count() -> None:
    kept = saved(make(lambda optimizer: lr_scheduler.StepLR(optimizer, 10)))
    found = replaced_settings(make(lambda optimizer: lr_scheduler.StepLR(optimizer, 5), lr=0.2), kept)
    assert sorted(found) == [
        "state.optimizer has initial_lr=0.1 as saved, not 0.2 as given here",
        "state.scheduler has step_size=10 as saved, not 5 as given here",
    ]


def test_what_the_checkpoint_does_not_know_is_left_out() -> None:
    assert replaced_settings(make(lambda optimizer: lr_scheduler.StepLR(optimizer, 5)), {}) == []


def test_objects_that_a_checkpoint_knows_nothing_of_are_named_if_it_knows_their_attribute() -> None:
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    there = {"models": {"a": StateDict(first.state_dict())}, "steps": [StateDict(first.state_dict())], "average": None}
    live = {"models": {"a": first, "b": second}, "steps": [first], "average": second, "new": second}
    assert dropped_objects(live, there) == ["state.models['b'], here Linear", "state.average, here Linear"]


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=4),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4),
        lambda optimizer: swa_utils.SWALR(optimizer, 0.5, anneal_epochs=3),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_scheduler_that_is_new_to_the_job_begins_as_it_does_in_a_new_job(make_scheduler: Any, kind: Any) -> None:
    def rates(kept: dict[str, StateDict]) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.ones(1)
        optimizer = kind([weight], lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        scheduler = make_scheduler(optimizer)
        live = {"optimizer": optimizer, "scheduler": scheduler}
        assert replaced_settings(live, kept) == []
        prepared = PreparedGroups(live, kept)
        if kept:
            optimizer.load_state_dict(kept["optimizer"].content)
        prepared.put_back()
        found = []
        for _ in range(6):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    earlier = torch.nn.Parameter(torch.zeros(1))
    earlier.grad = torch.ones(1)
    before = kind([earlier], lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    before.step()
    assert rates({"optimizer": StateDict(before.state_dict())}) == rates({})


@pytest.mark.parametrize("makes_rate", [True, False])
def test_a_new_scheduler_whose_first_rate_is_lost_to_one_that_goes_on_is_told(makes_rate: bool) -> None:
    """It warmed up to a rate ten times too high."""
    live = make(lambda optimizer: lr_scheduler.StepLR(optimizer, 100))
    kept = saved(live)
    live["warm"] = lr_scheduler.LinearLR(live["optimizer"], 0.1 if makes_rate else 1.0, total_iters=4)
    told = [
        "state.warm is new to it and goes on from the rate that state.scheduler has there: one that it has set as it was made, "
        "such as the first of a warm-up, is gone"
    ]
    assert replaced_settings(live, kept) == (told if makes_rate else [])


class Warmup(lr_scheduler.LRScheduler):
    """One of a user's own that does without the base class's attributes, as schedulers by hand do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups, self._steps = optimizer.param_groups, 0

    def step(self, epoch: int | None = None) -> None:
        self._steps += 1
        self._groups[0]["lr"] = 0.1 * min(1.0, self._steps / 10)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}


def test_a_scheduler_that_does_not_say_which_optimizer_it_has_can_be_resumed() -> None:
    live, kept = make(Warmup), saved(make(Warmup))
    PreparedGroups(live, kept).put_back()
    assert "state.optimizer has lr=0.03 as saved, not 0.1 as given here" in replaced_settings(live, kept)


def test_a_scheduler_that_waits_for_a_plateau_goes_on_from_the_saved_rate_and_another_one_here_is_told() -> None:
    live = make(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer), lr=0.2)
    kept = saved(make())
    assert replaced_settings(live, kept) == ["state.optimizer has lr=0.1 as saved, not 0.2 as given here"]
    prepared = PreparedGroups(live, kept)
    live["optimizer"].load_state_dict(kept["optimizer"].content)
    prepared.put_back()
    assert live["optimizer"].param_groups[0]["lr"] == 0.1
