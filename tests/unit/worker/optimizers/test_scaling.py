"""Learning rates that follow the world, exactly also through a restore; batches cut into parts with the same gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from worker_stage import on_stage

from spark_elastic import TorchState, micro_batches, scale_learning_rate
from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "cosine to a floor": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=0.01),
    "weight averaging": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=6),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 4, cycle_momentum=False),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6),
            lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        ],
        [6],
    ),
}


class Training:
    """A state, its callback, and one step at a time."""

    def __init__(self, scheduler: str = "none", commit: str = "copy", **options: Any) -> None:
        self.model = torch.nn.Linear(2, 1)
        groups = [{"params": [self.model.weight]}, {"params": [self.model.bias], "lr": 0.3}]
        self.optimizer = torch.optim.SGD(groups, lr=0.1)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.on_reset = scale_learning_rate(self.optimizer, self.scheduler, **options)
        self.state = TorchState(self.model, self.optimizer, self.scheduler, commit=commit)

    def step(self) -> list[float]:
        """Return the rates that this step was made with."""
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        used = self.rates
        if self.scheduler is not None:
            self.scheduler.step()
        return used

    def steps(self, count: int) -> list[list[float]]:
        return [self.step() for _ in range(count)]

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_rates_of_all_groups_follow_the_size_by_the_rule(rule: str, factor: float) -> None:
    training = Training(rule=rule)
    training.on_reset(2, 8)
    assert training.rates == pytest.approx([0.1 * factor, 0.3 * factor])
    training.on_reset(8, 2)
    assert training.rates == pytest.approx([0.1, 0.3])


@pytest.mark.parametrize("warmup_steps", [0, 4])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_keeps_its_course_at_another_scale(scheduler: str, warmup_steps: int) -> None:
    plain, scaled = Training(scheduler), Training(scheduler, warmup_steps=warmup_steps)
    assert plain.steps(4) == scaled.steps(4)
    scaled.on_reset(1, 3)
    expected, seen = plain.steps(14), scaled.steps(14)
    scales = [1 + 2 * min(1.0, (step + 1) / warmup_steps) if warmup_steps else 3.0 for step in range(14)]
    assert seen == [
        pytest.approx([rate * scale for rate in rates]) for rates, scale in zip(expected, scales, strict=True)
    ]


def test_the_floor_of_a_plateau_keeps_its_place() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, min_lr=0.05)
    scale_learning_rate(optimizer, scheduler)(1, 2)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_warm_up_takes_even_parts() -> None:
    training = Training(warmup_steps=4)
    training.on_reset(4, 8)
    assert [rates[0] for rates in training.steps(6)] == pytest.approx([0.125, 0.15, 0.175, 0.2, 0.2, 0.2])


class Careful(torch.optim.SGD):
    """Calls its base class's step, for which torch calls the hooks again once an SGD has been made."""

    def step(self, closure: Any = None) -> Any:
        """Step."""
        return super().step(closure)


def test_a_warm_up_counts_the_steps_of_a_subclass_that_calls_its_base_class_once() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight], lr=0.1)
    optimizer = Careful([weight], lr=0.1)
    scale_learning_rate(optimizer, warmup_steps=4)(4, 8)
    rates = []
    for _ in range(5):
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.125, 0.15, 0.175, 0.2, 0.2])


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 7)), min_size=1, max_size=8), st.sampled_from([1, 5]))
@settings(deadline=None, max_examples=50)
def test_resets_within_a_warm_up_end_at_the_rate_of_the_last_size(resets: list[tuple[int, int]], warmup: int) -> None:
    training, size = Training(warmup_steps=warmup), 1
    for new_size, steps in resets:
        training.on_reset(size, new_size)
        training.steps(steps)
        size = new_size
    training.steps(warmup)
    assert training.rates == pytest.approx([0.1 * size, 0.3 * size])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_restore_in_the_middle_of_a_warm_up_is_exact(scheduler: str) -> None:
    training = Training(scheduler, warmup_steps=5)
    training.on_reset(2, 7)
    training.steps(2)
    training.state.commit()
    first = training.steps(8)
    training.state.restore()
    assert training.steps(8) == first
    assert len({tuple(rates) for rates in first}) > 2


def test_a_callback_whose_generation_fails_is_forgotten() -> None:
    training = Training(warmup_steps=5)
    training.state.commit()
    training.on_reset(2, 1)
    training.state.restore()
    training.on_reset(2, 4)
    training.steps(5)
    assert training.rates == pytest.approx([0.2, 0.6])


def test_a_newcomer_takes_a_warm_up_over_where_it_is() -> None:
    old, new = Training("lambda", warmup_steps=5), Training("lambda", warmup_steps=5)
    old.on_reset(1, 3)
    old.steps(2)
    old.state.commit()
    new.state._load(old.state._keeper.current.content()["objects"])
    assert new.steps(8) == old.steps(8)


def test_in_place_a_step_that_a_broken_world_refuses_does_not_count_for_the_warm_up() -> None:
    training, other = Training("lambda", "in_place", warmup_steps=5), Training("lambda", warmup_steps=5)
    for each in (training, other):
        each.on_reset(1, 3)
    with on_stage() as stage:
        DistributedDataParallel(training.state.model)
        stage.begin(training.state)
        assert training.step() == other.step()
        training.state.commit()
        stage.broken = True
        with pytest.raises(WorkerLostError):
            training.step()
        stage.broken = False
        training.state.restore()
        for _ in range(6):
            assert training.step() == other.step()
            training.state.commit()


@pytest.mark.parametrize(("options", "words"), [({"rule": "cubic"}, "'cubic'"), ({"warmup_steps": -1}, "-1")])
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Training(**options)


class Counted(torch.nn.Linear):
    """Counts the backward passes in which ranks would talk."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.double()
        self.syncing = True
        self.log: list[bool] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncing = False
        yield
        self.syncing = True

    def loss(self, batch: Any) -> torch.Tensor:
        self.log.append(self.syncing)
        return (self(batch["x"]).squeeze(1) - batch["y"][0]).square().mean()


@given(st.integers(1, 40), st.integers(1, 50))
@settings(deadline=None)
def test_parts_give_the_gradient_of_the_whole_batch_and_sync_once(total: int, rows: int) -> None:
    model = Counted()
    batch = {"x": torch.randn(total, 3, dtype=torch.float64), "y": (torch.randn(total, dtype=torch.float64),)}
    model.loss(batch).backward()
    whole = model.weight.grad.clone()
    model.zero_grad()
    model.log.clear()
    sizes = []
    for part, share in micro_batches(model, batch, rows):
        sizes.append(len(part["x"]))
        assert share == sizes[-1] / total
        (share * model.loss(part)).backward()
    assert torch.allclose(model.weight.grad, whole)
    assert (sum(sizes), max(sizes) <= rows) == (total, True)
    assert model.log == [False] * (len(sizes) - 1) + [True]


def test_jagged_tensors_are_cut_like_others() -> None:
    lists = torch.nested.nested_tensor([torch.ones(n) * n for n in (2, 1, 3)], layout=torch.jagged)
    parts = [part for part, _ in micro_batches(Counted(), {"lists": lists, "y": torch.arange(3)}, 2)]
    assert [[len(row) for row in part["lists"].unbind()] for part in parts] == [[2, 1], [3]]
    assert [part["y"].tolist() for part in parts] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("batch", "rows", "words"),
    [
        (torch.ones(3), 0, "rows must be a whole number from 1 on, not 0"),
        ({"x": torch.ones(3), "y": torch.ones(2)}, 1, "same number of rows"),
        ({"x": torch.ones(3), "name": ["a", "b", "c"]}, 1, "consists of tensors"),
        (torch.ones(0, 2), 1, "at least one"),
        ({}, 1, "at least one"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, rows: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(micro_batches(Counted(), batch, rows))
