"""What tells that each worker trains a model of its own where no State compares them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spark_elastic.worker.checks.lone_training import STEPS, LoneTraining


def fixed(rank: int = 0, size: int = 2) -> Any:
    return SimpleNamespace(
        state=None, max_np=size, worker=rank, world=SimpleNamespace(rank=rank, size=size, collectives=7)
    )


def plain(number: int = 0, max_np: int = 2) -> Any:
    return SimpleNamespace(state=None, max_np=max_np, worker=number, world=None)


def train(job: Any, steps: int, between: Callable[[Any], object] = lambda job: None) -> list[str]:
    """Step an optimizer so often; return the warnings."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with LoneTraining(job):
            for _ in range(steps):
                optimizer.step()
                between(job)
    optimizer.step()  # nothing looks at it any more
    told = [warning for warning in heard if issubclass(warning.category, UserWarning)]
    assert all(warning.filename == __file__ for warning in told)
    return [str(warning.message) for warning in told]


def test_ranks_of_a_fixed_world_that_share_nothing_are_told_at_the_end_of_a_short_function() -> None:
    (told,) = train(fixed(), 5)
    assert told.startswith("an optimizer has stepped 5 times in a world of 2 ranks, and no collective has been entered")
    assert "model = se.DistributedDataParallel(model)" in told


def test_a_long_training_is_told_once_while_it_runs() -> None:
    job, at = fixed(), []
    assert len(train(job, 3 * STEPS, between=lambda job: at.append(1))) == 1
    assert f"stepped {STEPS} times" in train(job, 3 * STEPS)[0]


def test_a_function_without_an_elastic_function_is_told_that_its_workers_train_alone() -> None:
    (told,) = train(plain(), 5)
    assert "calls no elastic function: each of 2 workers runs it alone" in told
    assert "elastic=False" in told


def test_a_single_collective_between_the_steps_shows_that_ranks_share_something() -> None:
    def reduce(job: Any) -> None:
        job.world.collectives += 1

    assert not train(fixed(), 5, between=reduce)


def test_a_state_compares_ranks_itself_also_if_it_comes_after_some_steps() -> None:
    def enter(job: Any) -> None:
        job.state = object()

    assert not train(fixed(), 5, between=enter)
    assert not train(plain(), 5, between=enter)


@pytest.mark.parametrize("job", [fixed(rank=1), fixed(size=1), plain(number=1), plain(max_np=1)])
def test_one_worker_tells_it_and_one_alone_has_nobody_to_share_with(job: Any) -> None:
    assert not train(job, 5)


def test_a_function_that_fails_is_told_of_its_error_alone() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched = LoneTraining(fixed()).__enter__()
        optimizer.step()
        optimizer.step()
        watched.__exit__(KeyError, None, None)
