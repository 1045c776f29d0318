"""Optimizers that step at different times: gradients that wait for a step across a commit are refused, leftovers are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from worker_stage import Stage, on_stage

from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.carried_gradients import is_any_set
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.state.torch_state import TorchState

CARRIED = r"an optimizer \(SGD\) steps with gradients that were there at a commit already"


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage() as stage:
        yield stage


class Job:
    """A body and a head, each with an optimizer of its own."""

    def __init__(self, stage: Stage) -> None:
        self.body, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.model: Any = DistributedDataParallel(torch.nn.Sequential(self.body, self.head))
        self.slow, self.fast = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head))
        self.state = TorchState(model=self.model, slow=self.slow, fast=self.fast)
        stage.begin(self.state)

    def step_fast(self, commit: bool = True) -> None:
        self.fast.zero_grad()
        self.model(torch.ones(3, 2)).sum().backward()
        self.fast.step()
        if commit:
            self.state.commit()


def test_a_step_with_gradients_of_several_commits_is_refused(stage: Stage) -> None:
    job = Job(stage)
    job.step_fast()
    job.step_fast(commit=False)
    with pytest.raises(TrainingCodeError, match=CARRIED):
        job.slow.step()


def test_a_step_with_gradients_of_before_the_commit_alone_is_refused(stage: Stage) -> None:
    job = Job(stage)
    job.step_fast()
    with pytest.raises(TrainingCodeError, match=CARRIED):
        job.slow.step()


def test_commits_where_all_optimizers_have_stepped_lose_nothing(stage: Stage) -> None:
    job = Job(stage)
    for _ in range(2):
        job.step_fast(commit=False)
        job.step_fast(commit=False)
        job.slow.step()
        job.slow.zero_grad()
        job.state.commit()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_nobody_uses_may_be_left_over(stage: Stage, to_none: bool) -> None:
    job = Job(stage)
    for _ in range(2):
        job.step_fast()
        job.step_fast()
        job.slow.zero_grad(set_to_none=to_none)
        job.step_fast(commit=False)
        job.slow.step()


def test_gradients_that_were_used_before_the_first_of_two_commits_are_no_others(stage: Stage) -> None:
    job = Job(stage)
    for _ in range(3):
        job.step_fast(commit=False)
        job.slow.step()
        job.state.commit()
        job.state.commit()  # at the end of an epoch


def test_gradients_that_are_assigned_are_those_of_the_step(stage: Stage) -> None:
    job = Job(stage)
    for _ in range(3):
        job.step_fast()
        loss = job.model.module(torch.ones(3, 2)).sum()
        for parameter, gradient in zip(
            job.body.parameters(), torch.autograd.grad(loss, list(job.body.parameters())), strict=True
        ):
            parameter.grad = gradient
        job.slow.step()


def test_a_closure_computes_the_gradients_itself(stage: Stage) -> None:
    job = Job(stage)

    def closure() -> torch.Tensor:
        job.slow.zero_grad()
        loss = job.model(torch.ones(3, 2)).sum()
        loss.backward()
        return loss

    for _ in range(3):
        job.step_fast()
        job.slow.step(closure)
        job.state.commit()


def test_a_parameter_that_was_dropped_and_not_reached_again_has_no_gradient(stage: Stage) -> None:
    job = Job(stage)
    job.step_fast()
    job.step_fast()
    job.slow.zero_grad()
    job.slow.step()


def test_the_gradients_of_a_part_that_has_been_frozen_do_not_matter(stage: Stage) -> None:
    job = Job(stage)
    job.step_fast(commit=False)
    job.body.requires_grad_(False)
    job.state.commit()
    job.step_fast()


def test_nothing_is_watched_where_every_optimizer_steps(stage: Stage) -> None:
    job = Job(stage)
    for _ in range(2):
        job.step_fast(commit=False)
        job.slow.step()
        job.state.commit()
    assert not any(parameter._backward_hooks for parameter in job.model.parameters())


def test_a_sparse_gradient_is_looked_at_too() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    assert not is_any_set(table.weight.grad)
    table(torch.tensor([1, 1])).sum().backward()
    assert is_any_set(table.weight.grad)
    table.zero_grad(set_to_none=False)
    assert not is_any_set(table.weight.grad)
