"""Mistakes of ordinary user code, in jobs of this machine: training is right, or something says that it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import loud_training
import pytest

import spark_elastic
from spark_elastic.errors import ResetLimitExceededError, SparkElasticError
from spark_elastic.testing import inject, kill


def test_values_that_each_rank_computes_alone_are_warned_of_once_also_through_a_loss(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with inject(kill(rank=1, step=3)):
        results = spark_elastic.run(
            loud_training.train_with_values_of_each_rank, args=(6,), num_proc=3, min_np=2, max_np=3, local=True
        )
    assert {steps for steps, _ in results} == {6}
    # After the reset, survivors and newcomers have the values of one rank.
    entered = [of_all for _, entries in results for of_all in entries]
    assert entered
    for of_all in entered:
        assert of_all == [of_all[0]] * len(of_all)
        assert of_all[0][2] is None
    told = [line for line in capfd.readouterr().err.splitlines() if "UserWarning" in line]
    named = ("state.best is", "state.losses[0] is", "state.only_on_one[0] is there")
    assert [any(name in line for name in named) for line in told] == [True] * 3
    assert all("se.allreduce" in line for line in told)


def test_code_that_swallows_the_loss_of_a_worker_goes_on_from_the_last_commit() -> None:
    with inject(kill(rank=1, step=4)):
        results = spark_elastic.run(
            loud_training.train_and_swallow_errors_of_a_step, args=(8,), num_proc=3, min_np=2, max_np=3, local=True
        )
    assert set(results) == {8}


@pytest.mark.parametrize("way", ["all_reduce", "async_op", "objects", "transfer", "barrier"])
def test_the_loss_of_a_worker_is_no_runtime_error_in_torchs_own_collectives(way: str) -> None:
    """Code that goes on after running out of memory would swallow it, and wait for ever for a rank that is gone."""
    with inject(kill(rank=1, step=4)):
        results = spark_elastic.run(
            loud_training.train_and_go_on_after_runtime_errors,
            args=(8, way), num_proc=3, min_np=2, max_np=3, local=True, start_timeout=60,
        )  # fmt: skip
    assert results == [(8, [])] * len(results)


def test_a_result_that_the_driver_cannot_unpickle_is_named() -> None:
    message = "fn has returned in all workers, and result 0 cannot be unpickled here: ValueError: invalid literal"
    with pytest.raises(SparkElasticError, match=message):
        spark_elastic.run(loud_training.NoNumber, num_proc=1, local=True)


@pytest.mark.parametrize("function", [loud_training.end_before_training, loud_training.end_while_training])
def test_the_error_of_a_job_says_how_its_last_worker_ended(function: Callable[[], None]) -> None:
    with pytest.raises(ResetLimitExceededError) as failure:
        spark_elastic.run(function, num_proc=1, reset_limit=0, local=True)
    assert "failures have caused 1 reset, more than reset_limit=0 allows; the last one: " in str(failure.value)
    assert str(failure.value).count("exited with code 7 before its result had arrived") == 2


def test_a_loader_forks_its_workers_while_no_collective_is_pending() -> None:
    """A fork during a process's first collective held a lock of the C library for ever, in one of three starts."""
    broken: list[dict[str, Any]] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "world_broken":
            broken.append(event)

    for _ in range(8):
        steps = spark_elastic.run(
            loud_training.train_with_workers_of_a_loader,
            args=(2,), num_proc=2, min_np=1, max_np=2, local=True, hang_timeout=5, on_event=watch,
        )  # fmt: skip
        assert steps == [8, 8]
    assert broken == []
